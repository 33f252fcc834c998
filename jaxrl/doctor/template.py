"""The check of the chat template: what a run finds before it starts, and which conversations stay one branch."""

from __future__ import annotations

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, verdict
from jaxrl.errors import JaxrlError
from jaxrl.inference.rendering.preflight import Needs, preflight


def check_template(exam: Examination) -> Finding:
    """Prompts begin and end as they should, and conversations of every kind keep the prefix property or are told not to."""
    from jaxrl.launch.preflight import template_needs

    try:
        needs = template_needs(exam.config, *exam.worlds)
    except JaxrlError:  # told by the checks that play in them
        needs = Needs()
    found = preflight(exam.renderer, needs)
    text = f"sha256 {found.template_sha256[:12]}, replies begin after {found.asks!r}"
    if found.continued:
        text += f", each turn continues the one before ({', '.join(found.continued)})"
    if found.rewritten:
        (kind, difference), *others = found.rewritten.items()
        dropped = f"{kind}: {difference}" + (f", and {len(others)} more" if others else "")
        text += f", but a later turn rewrites history and starts a new branch ({dropped})"
    if found.refused:
        text += f", and refuses some conversations ({', '.join(found.refused)})"
    return verdict(text, list(found.problems), list(found.remarks))
