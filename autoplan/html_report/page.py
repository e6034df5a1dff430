"""One HTML page: its templates, its style and its script, and the policy that lets nothing else run or load.

The policy names the style and the script by their hashes, so that text that found its way into the page as an element
would still not run, and nothing is ever requested.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from typing import Any

from jinja2 import BaseLoader, Environment, PackageLoader, StrictUndefined

from autoplan.html_report.palette import DARK, LIGHT, Theme, chart_css
from autoplan.html_report.provenance import MEANINGS
from autoplan.html_report.svg import printable


def render(template: str, **values: Any) -> str:
    """The page of a template that extends `page.html.jinja`."""
    loader = PackageLoader("autoplan.html_report", package_path="")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    css = _theme_css() + _source(loader, environment, "page.css") + chart_css()
    script = _source(loader, environment, "sort.js")
    common = {"css": css, "script": script, "policy": _policy(css=css, script=script), "meanings": MEANINGS}
    return environment.get_template(template).render(**common, **values)


def _source(loader: BaseLoader, environment: Environment, name: str) -> str:
    return loader.get_source(environment, name)[0]


def _policy(*, css: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _theme_css() -> str:
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}"
    return f":root {{ {_variables(LIGHT)} }}\n{dark}\n"


def _variables(theme: Theme) -> str:
    names = ("paper", "band", "ink", "soft", "line")
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)
