"""The tensors of safetensors files, by the names of the model that they are for.

Newer versions of transformers name some tensors otherwise than the files do, and hold others together that the files
hold apart: the experts of a mixture, or queries, keys and values. What has to be done is written down in transformers
for each kind of model; here it is done for one tensor at a time.

Left out: where files come from, and what a new tensor starts with (`sources`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from chatgpt.nn.unfit import is_known, open_weights


@dataclass
class _Recipe:
    """How tensors of a model are made from those of the files."""

    first: str
    """name in the model of the tensor, or of the first where several are cut out of one"""
    converter: WeightConverter | None = None
    """None: the tensor is in the files as it is"""
    parts: dict[str, list[str]] = field(default_factory=dict)
    """names in the files, by the pattern that they match"""


class StoredTensors:
    """Random access to the tensors of `files`.

    Args:
        files: safetensors files.
        path: what to name where no single file can be named.
        model: whose names are used; nothing is read into it.

    Raises ValueError for a damaged file.
    """

    def __init__(self, files: Sequence[Path], path: Any, model: PreTrainedModel) -> None:
        self.model = model
        self.default: Any = files[0] if len(files) == 1 else path
        self.where: dict[str, tuple[Path, Any]] = {}
        """by name in the files: the file, and what is open to read from"""
        for file in files:
            handle = open_weights(file)
            self.where |= dict.fromkeys(handle.keys(), (file, handle))
        self.unexpected: list[str] = []
        """names in the files for which the model has no place"""
        self.recipes: dict[str, _Recipe] = {}
        """by name in the model"""
        self._find_recipes()

    def _find_recipes(self) -> None:
        transforms = get_model_conversion_mapping(self.model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        names = self.model.state_dict()
        prefix = self.model.base_model_prefix
        # Some renamings wait for the name of an earlier layer, and experts are put together in their order.
        for stored in sorted(self.where, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, names)
            if name not in names:
                plain, _ = rename_source_key(stored, [], [], prefix, names)
                if plain in names:
                    name, pattern = plain, None
            if name not in names:
                if not is_known(self.model, name):
                    self.unexpected.append(stored)
            elif pattern is None:
                self.recipes[name] = _Recipe(name, None, {stored: [stored]})
            else:
                converter = by_pattern[pattern]
                recipe = self.recipes.setdefault(name, _Recipe(name, converter))
                recipe.parts.setdefault(pattern, []).append(stored)
                for other in converter.target_patterns[1:]:
                    self.recipes[name.replace(converter.target_patterns[0], other)] = recipe

    def __contains__(self, name: str) -> bool:
        return name in self.recipes

    def file_of(self, name: str) -> Any:
        """The file that holds that tensor, or the first part of it; when none does, the only file or the path."""
        if name in self.recipes:
            name = next(iter(self.recipes[name].parts.values()))[0]
        return self.where[name][0] if name in self.where else self.default

    def name_of(self, name: str) -> str:
        """What an error calls that tensor: its name in the files where it has one."""
        recipe = self.recipes[name]
        return name if recipe.converter is not None else next(iter(recipe.parts))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Without reading it; None where parts are put together or cut apart."""
        if self.recipes[name].converter is not None:
            return None
        stored = self.name_of(name)
        return tuple(self.where[stored][1].get_slice(stored).get_shape())

    def get(self, name: str) -> Tensor:
        """The tensor. Raises ValueError where its parts do not fit together."""
        recipe = self.recipes[name]
        if recipe.converter is None:
            return self._read(self.name_of(name))
        converter = copy.deepcopy(recipe.converter)
        for pattern, stored in recipe.parts.items():
            for part in stored:
                converter.add_tensor(recipe.first, part, pattern, self._read(part))  # type: ignore[arg-type]
        try:
            made = converter.convert(recipe.first, model=self.model, config=self.model.config)[name]
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f'{self.file_of(name)}: {name} of {type(self.model).__name__} cannot be made from '
                f'{", ".join(sum(recipe.parts.values(), [])[:3])}: {(str(error).splitlines() or [""])[0]}; '
                'config.json and the weights are of different models, or the weights are incomplete'
            ) from None
        return made[0] if isinstance(made, list) else made

    def _read(self, stored: str) -> Tensor:
        return self.where[stored][1].get_tensor(stored)
