"""Keys and tables that installed packages add to a job, through the entry point group `titan.sections`."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import create_model

from .base import Section
from .errors import ConfigError, Problem
from .plug_ins import load_plug_in, plug_ins

Job = TypeVar("Job", bound=Section)


def extend(job: type[Job], names: dict[str, Any]) -> type[Job]:
    """Return the class of a job with the keys and tables that packages add.

    Args:
        job: class of the job.
        names: namespace of the module of `job`. An extended section replaces the original section there, because pickle looks
            it up by name.

    Raises:
        ConfigError: A section already has the key, or is a choice between sections.
    """
    sections: dict[str, Any] = {}
    for entry in plug_ins("titan.sections"):
        name, more = entry.name.partition(".")[0], load_plug_in(entry)
        field = job.model_fields.get(name)
        known = sections.get(name, field.annotation if field else None)
        if known is None:
            sections[name] = more
            continue
        is_section = isinstance(known, type) and issubclass(known, Section)
        if not is_section or known.model_fields.keys() & more.model_fields.keys():
            reason = "already has one of its keys"
            if not is_section:
                reason = "is a choice, which has a group"
            message = f"entry point {entry.name}: [{name}] {reason}"
            raise ConfigError([Problem("", 0, "", message)])
        about = {"__doc__": known.__doc__, "__module__": job.__module__}
        sections[name] = names[known.__name__] = type(known.__name__, (known, more), about)
    if not sections:
        return job
    fields: dict[str, Any] = {
        name: (list[section], []) if section.is_list else (section, section())
        for name, section in sections.items()
    }
    about = {"__doc__": job.__doc__, "__module__": job.__module__}
    return create_model(job.__name__, __base__=job, **about, **fields)
