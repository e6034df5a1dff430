"""`python -m autoplan.measure_hardware`: see the package."""

import sys

from autoplan.measure_hardware.measure import main

sys.exit(main())
