"""Make the teachers of a recipe: `make_teachers`.

Models of teachers in this process are loaded once for all policies (`LoadedTeachers`), and compared
with the policy's renderer: one that reads other ids gets a `Translation`.
"""

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
    if len(teachers) == 1:
        return [teachers[0].name or "teacher"]
    return [teacher.name or f"teacher{number}" for number, teacher in enumerate(teachers, 1)]


def make_teachers(
    config: RunConfig, renderer: ChatRenderer, on_note: Callable[[str], None] | None = None
) -> MakeTeachers | None:
    """Return what makes the teachers of a policy; None without `[[teacher]]`.

    What it returns raises `ConfigError` for a teacher that does not read the policy's ids, or whose
    hint is not a function of a trajectory.
    """
    if not config.teacher:
        return None

    batching = config.train.batching
    models = LoadedTeachers(config.model, renderer)

    def make(policy: TaughtPolicy) -> Teachers:
        teachers: list[Teacher] = []
        for settings, name in zip(config.teacher, teacher_names(config.teacher), strict=True):
            loaded = None if settings.path is None else models.load(Path(settings.path), name)
            hint = None
            if settings.hint is not None:
                hint = Hint(settings.hint, renderer if loaded is None else loaded.renderer)

            teacher: Teacher
            if settings.urls:
                teacher = RemoteTeacher(settings, name, policy, hint, renderer, on_note)
            elif settings.self:
                teacher = SelfTeacher(settings, name, policy, hint, policy.forward, batching)
            elif loaded is None:
                continue
            elif loaded.translation is None:
                teacher = LocalTeacher(settings, name, policy, hint, loaded.forward, batching)
            else:
                teacher = AlignedTeacher(
                    settings,
                    name,
                    policy,
                    hint,
                    loaded.forward,
                    batching,
                    translation=loaded.translation,
                    banned_ids=loaded.renderer.banned_ids,
                )
            teachers.append(teacher)
        return Teachers(teachers, config.train.reward_weight)

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
        self._model = model
        self._policy = renderer
        self._loaded: dict[Path, LoadedTeacher] = {}

    def load(self, directory: Path, name: str) -> LoadedTeacher:
        """Load a teacher's model, frozen; raise `ConfigError` if there is none or it cannot read
        the policy's ids, `ModelError` if it cannot be loaded."""
        if directory in self._loaded:
            return self._loaded[directory]

        if not directory.is_dir():
            raise ConfigError(
                f"teacher {name}: path = {str(directory)!r}: no such directory; name a model "
                "directory, such as checkpoints/step-00080 of a run that has ended"
            )
        renderer = renderer_of(directory, ModelConfig())
        translation = self._translation(renderer, directory, name)
        model, meta = load(directory, *device_and_dtype(self._model))
        renderer.ban(range(meta.tokens, meta.vocabulary))
        forward = ForwardPass(model.requires_grad_(False).eval())
        self._loaded[directory] = LoadedTeacher(forward, renderer, translation)
        return self._loaded[directory]

    def _translation(
        self, renderer: ChatRenderer, directory: Path, name: str
    ) -> Translation | None:
        policy = self._policy
        other_ids = list(renderer.codec.token_texts) != list(policy.codec.token_texts)
        theirs = renderer.fingerprints.get("vision")
        ours = policy.fingerprints.get("vision")
        if ours is not None and (other_ids or theirs != ours):
            why = "prepares images in another way"
            if theirs is None:
                why = "reads no images"
            elif other_ids:
                why = "has another tokenizer"
            raise ConfigError(
                f"teacher {name}: {directory} {why}, but the policy reads images; name a "
                "vision-language model with the policy's tokenizer and image processor"
            )
        return Translation(policy, renderer, name) if other_ids else None
