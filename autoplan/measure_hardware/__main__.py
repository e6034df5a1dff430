"""`python -m autoplan.measure_hardware`: see the package."""

import sys

from autoplan.measure_hardware import main

sys.exit(main())
