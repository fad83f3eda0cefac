"""Make the teachers of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from turnwright.config import ModelConfig, RunConfig, TeacherConfig
from turnwright.errors import ConfigError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.model.directory import renderer_of
from turnwright.training.model.models import device_and_dtype, load
from turnwright.training.teachers.aligned import AlignedTeacher
from turnwright.training.teachers.alignment import Translation
from turnwright.training.teachers.local import LocalTeacher, SelfTeacher
from turnwright.training.teachers.remote import RemoteTeacher
from turnwright.training.teachers.teacher import Hint, MakeTeachers, TaughtPolicy, Teacher, Teachers


def teacher_names(teachers: Sequence[TeacherConfig]) -> list[str]:
    """Return the labels of teachers in metrics."""
    only = len(teachers) == 1
    return [
        one.name or ("teacher" if only else f"teacher{number}")
        for number, one in enumerate(teachers, 1)
    ]


def make_teachers(
    config: RunConfig, renderer: ChatRenderer, on_note: Callable[[str], None] | None = None
) -> MakeTeachers | None:
    """Return what makes the teachers of a policy; None without `[[teacher]]`. Models are
    loaded once, for all policies.

    Raises `ConfigError` for a teacher that does not read the policy's ids, or whose hint is not a
    function of a trajectory.
    """
    if not config.teacher:
        return None
    models = LoadedTeachers(config.model, renderer)

    def make(policy: TaughtPolicy) -> Teachers:
        made: list[Teacher] = []
        for given, name in zip(config.teacher, teacher_names(config.teacher), strict=True):
            own = None if given.path is None else models.load(Path(given.path), name)
            hint = (
                None
                if given.hint is None
                else Hint(given.hint, own.renderer if own is not None else renderer)
            )
            if given.urls:
                made.append(RemoteTeacher(given, name, policy, hint, renderer, on_note))
            elif given.self:
                made.append(
                    SelfTeacher(given, name, policy, hint, policy.forward, config.train.batching)
                )
            elif own is not None:
                options = (given, name, policy, hint, own.forward, config.train.batching)
                if own.translation is None:
                    made.append(LocalTeacher(*options))
                else:
                    made.append(
                        AlignedTeacher(
                            *options,
                            translation=own.translation,
                            banned_ids=own.renderer.banned_ids,
                        )
                    )
        return Teachers(made, config.train.reward_weight)

    return make


class LoadedTeacher(NamedTuple):
    """A teacher's model and how it reads the policy's ids."""

    forward: ForwardPass
    renderer: ChatRenderer
    translation: Translation | None
    """None where its ids are the policy's."""


class LoadedTeachers:
    """Models of teachers by directory, each loaded and compared with the policy's renderer once."""

    def __init__(self, model: ModelConfig, renderer: ChatRenderer) -> None:
        self._model, self._policy = model, renderer
        self._loaded: dict[Path, LoadedTeacher] = {}

    def load(self, directory: Path, name: str) -> LoadedTeacher:
        """Load a teacher's model, frozen; raise `ConfigError` if there is none or it cannot read
        the policy's ids, `ModelError` if it cannot be loaded."""
        if directory not in self._loaded:
            if not directory.is_dir():
                raise ConfigError(
                    f"teacher {name}: path = {str(directory)!r}: no such directory; name a model "
                    "directory, such as checkpoints/step-00080 of a run that has ended"
                )
            own = renderer_of(directory, ModelConfig())
            translation = self._translation(own, directory, name)
            model, meta = load(directory, *device_and_dtype(self._model))
            own.ban(range(meta.tokens, meta.vocabulary))
            self._loaded[directory] = LoadedTeacher(
                ForwardPass(model.requires_grad_(False).eval()), own, translation
            )
        return self._loaded[directory]

    def _translation(self, own: ChatRenderer, directory: Path, name: str) -> Translation | None:
        policy = self._policy
        other = list(own.codec.token_texts) != list(policy.codec.token_texts)
        theirs, ours = own.fingerprints.get("vision"), policy.fingerprints.get("vision")
        if ours is not None and (other or theirs != ours):
            why = (
                "reads no images"
                if theirs is None
                else "has another tokenizer"
                if other
                else "prepares images in another way"
            )
            raise ConfigError(
                f"teacher {name}: {directory} {why}, but the policy reads images; name a "
                "vision-language model with the policy's tokenizer and image processor"
            )
        return Translation(policy, own, name) if other else None
