"""The model's processor as slime's user code calls it, over the renderer of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwright.media import MediaLimits
from turnwright.media.images import decode
from turnwright.renderers.renderer import vision_of
from turnwright.renderers.tokenizer_face import TokenizerFace
from turnwright.types import Image, ImageRef, Media, MediaPlacement, Message, Task

TOLERANCE = 1e-5
"""Of pixel values that user code computed, against those of the trainer."""


class ProcessorFace:
    """Methods of a `transformers` processor that loops of users call: texts with placeholders and
    their images to ids and the model's inputs."""

    def __init__(self, model: Any) -> None:
        self.tokenizer: TokenizerFace = model.tokenizer
        self._intake = model.media_intake
        vision = vision_of(model.renderer)
        assert vision is not None
        self._vision = vision

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessorFace:
        """Return itself: user code copies settings that have it, and it never changes."""
        return self

    def __call__(
        self, text: Any = None, images: Any = None, videos: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask`, a row for each text, and
        the inputs of all images.

        Those of images are tensors, as of processors of transformers, or arrays where
        `return_tensors` is "np". Ids are lists unless it is "pt".
        """
        texts, left = (
            [text] if isinstance(text, str) else list(text or ()),
            self._stored(images, videos),
        )
        rows: Any = []
        every = list(left)
        for one in texts:
            ids = self.tokenizer.encode(one)
            count = (
                sum(token in self._vision.pad_ids for token in ids) if len(texts) > 1 else len(left)
            )
            rows.append(self._vision.expand(ids, left[:count])[0])
            left = left[count:]
        kinds = (
            options.get("return_tensors"),
            (options.get("images_kwargs") or {}).get("return_tensors"),
        )
        inputs = self.inputs(every)
        if "np" not in kinds and (inputs or "pt" in kinds):
            import torch

            inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
            if kinds[0] == "pt":
                rows = torch.tensor(rows)
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], **inputs}

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation to text, as processors do, or with `tokenize=True` to ids."""
        return self.tokenizer.apply_chat_template(conversation, **{"tokenize": False, **options})

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Decode ids."""
        return self.tokenizer.decode(token_ids, **options)

    def batch_decode(self, sequences: Any, **options: Any) -> list[str]:
        """Decode several rows of ids."""
        return self.tokenizer.batch_decode(sequences, **options)

    def inputs(self, media: Sequence[Media]) -> dict[str, Any]:
        """Return what the trainer computes of images, by the names of the model's inputs."""
        return self._vision.merge([self._vision.process(one, self._intake.store) for one in media])

    def check(
        self, given: Mapping[str, Any], placed: Sequence[MediaPlacement], rest: Sequence[int]
    ) -> str:
        """Return why inputs that user code computed are not those of the
        trainer; empty if they are.

        `rest` are the sample's ids after its last reply, which may have
        images that no reply follows.
        """
        own = self.inputs([block.media for block in placed])
        more = not self._vision.pad_ids.isdisjoint(rest)
        for name, found in given.items():
            expected = own.get(name)
            if expected is None and found is not None and not more:
                return (
                    f"{name} is none of the model's inputs here ({', '.join(own) or 'no images'})"
                )
            if expected is not None and (wrong := _difference(found, expected, more)):
                return f"{name} {wrong}"
        missing = sorted(own.keys() - given.keys())
        return f"{', '.join(missing)} is missing" if missing else ""

    def _stored(self, images: Any, videos: Any) -> list[Media]:
        if videos:
            raise ValueError("processor: videos are not supported here; give images")
        several = (
            list(images)
            if isinstance(images, (list, tuple))
            else []
            if images is None
            else [images]
        )
        if not several:
            return []
        parts = tuple(one if isinstance(one, Image) else Image(one) for one in several)
        (message,) = self._intake.take_in((Message("user", parts),))
        return [*message.media]


def _difference(found: Any, expected: Any, more: bool) -> str:
    import numpy as np

    values = np.asarray(found, dtype=np.float64)  # a tensor, or an array
    first = values[: len(expected)]
    if first.shape != expected.shape or (len(values) > len(expected) and not more):
        return f"has the shape {tuple(values.shape)}, and the trainer's {tuple(expected.shape)}"
    differ = float(np.abs(first - expected.astype(np.float64)).max(initial=0.0))
    return f"differs by {differ:.3g} from what the trainer computes" if differ > TOLERANCE else ""


def pictures(task: Task) -> list[Any]:
    """Return the images of a row as Pillow images: those of its messages, else
    those for the environment."""
    parts = [
        part
        for message in task.messages
        if not isinstance(message.content, str)
        for part in message.content
    ]
    found: list[Any] = [part for part in parts if isinstance(part, (Image, ImageRef))] or list(
        task.images
    )
    return [open_picture(one.value) if isinstance(one, Image) else one for one in found]


def open_picture(value: Any) -> Any:
    """Return an image of any form as a Pillow image in RGB."""
    from PIL import Image as Pillow

    return (
        value.convert("RGB")
        if isinstance(value, Pillow.Image)
        else Pillow.fromarray(decode(value, MediaLimits()))
    )
