"""Keys whose alternatives are found in a folder, and not listed: the algorithms, their losses, tools and samplers.

The sections are in the files of later stages, beside the code that they configure; those files are imported here by the
name of their folder, and import nothing of `tandem.config.tree`. They are read with every configuration, so they may
not import torch (`tests/architecture`).
"""

from functools import reduce
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from tandem.config.base import Section
from tandem.discovery import classes_of, modules_in

SectionKind = TypeVar("SectionKind", bound=Section)


class FoundIn:
    """Any section of a folder that derives from the annotated one may stand here, chosen by `type`:
    `loss: Annotated[LossConfig, FoundIn("tandem.algorithms.builtin")]`.

    The folder is read when a configuration is first validated, and no sooner (`Section.model_config`): sections of the
    folder may derive from the one that has such a key.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def sections(self, base: type[SectionKind]) -> dict[str, type[SectionKind]]:
        """The sections by their type, which is the name of the file."""
        found: dict[str, type[SectionKind]] = {}
        for module in modules_in(self.package):
            name = module.__name__.rpartition(".")[2]
            for section in classes_of(module, base):
                types = get_args(section.model_fields["type"].annotation)
                if types:
                    assert types == (name,), f"{section.__name__}.type must be {name!r}, as its file is named"
                    found[name] = section
        return found

    def __get_pydantic_core_schema__(self, source: type[Section], handler: GetCoreSchemaHandler) -> CoreSchema:
        sections: list[Any] = list(self.sections(source).values())
        one_of_them = reduce(lambda union, section: union | section, sections)
        return handler.generate_schema(Annotated[one_of_them, Field(discriminator="type")])


def of_usual_type(usual: str) -> BeforeValidator:
    """A section that says no type is of this one."""

    def filled(given: Any) -> Any:
        return {"type": usual, **cast(dict[str, Any], given)} if isinstance(given, dict) else given

    return BeforeValidator(filled)


def sections_at(field: FieldInfo) -> list[type[Section]]:
    """Every section that may stand at a key; none where it holds a plain value."""
    return list(_sections(field.annotation, field.metadata))


def _sections(annotation: Any, metadata: Any = ()) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        folders = [mark for mark in metadata if isinstance(mark, FoundIn)]
        return list(folders[0].sections(annotation).values()) if folders else [annotation]
    parts = get_args(annotation)  # of Annotated[…]: the kind, then its marks
    return [section for part in parts for section in _sections(part, parts[1:])]
