"""Generate docs/fields.md from the table of fields: run as a module, this prints the page."""

import sys

from jaxserve.server.protocol.fields import FIELDS, FOLLOWED, NO_EFFECT, ROUTES, UNKNOWN, Cell, Refused

_HEAD = """\
# Fields of requests

What each route does with each field. *yes*: it is followed. *no effect*: it is known, and nothing on this route could
change by it. *400*: it is refused; the second table has the word that comes with the refusal. Null means absent
everywhere. A field that is in neither table is ignored, counted in `jaxserve:unknown_request_fields_total`, and logged
once; so is an unknown field of an object within a request, such as `stream_options.include_usag`.

Parameters of sampling act in one order, whatever the order in the body: penalties, `logit_bias`, `allowed_token_ids`
and masks of constraints, `bad_words`, `min_tokens`, then `top_n_sigma` on what these leave, `temperature`, `top_k`,
`top_p`, `min_p`. Log probabilities are those before all of this.

This page is printed from the table that requests are checked against: `jaxserve/server/protocol/fields.py`.
"""

_SHOWN: dict[Cell, str] = {FOLLOWED: "yes", NO_EFFECT: "no effect", UNKNOWN: ""}


def page() -> str:
    """Return the page, in Markdown."""
    table = [("field", *ROUTES, "meaning"), ("---",) * (len(ROUTES) + 2)]
    refusals = [("field", "routes", "the word"), ("---",) * 3]
    for field in FIELDS:
        cells = [field.cell(route) for route in ROUTES]
        shown = ("400" if isinstance(cell, Refused) else _SHOWN[cell] for cell in cells)
        table.append((f"`{field.name}`", *shown, field.meaning))
        routes_by_word: dict[str, list[str]] = {}
        for route, cell in zip(ROUTES, cells, strict=True):
            if isinstance(cell, Refused):
                routes_by_word.setdefault(cell.word, []).append(route)
        for word, routes in routes_by_word.items():
            where = "all" if len(routes) == len(ROUTES) else ", ".join(routes)
            refusals.append((f"`{field.name}`", where, word or "not supported"))
    return "\n".join([_HEAD, *map(_row, table), "", "## Refusals", "", *map(_row, refusals)]) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
