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
        texts = [text] if isinstance(text, str) else list(text or ())
        media = self._stored(images, videos)

        rows: Any = []
        left = media
        for row_text in texts:
            ids = self.tokenizer.encode(row_text)
            count = len(left)
            if len(texts) > 1:
                count = sum(token_id in self._vision.pad_ids for token_id in ids)
            rows.append(self._vision.expand(ids, left[:count])[0])
            left = left[count:]

        ids_kind = options.get("return_tensors")
        images_kind = (options.get("images_kwargs") or {}).get("return_tensors")
        kinds = (ids_kind, images_kind)
        inputs = self.inputs(media)
        if "np" not in kinds and (inputs or "pt" in kinds):
            import torch

            inputs = {name: torch.from_numpy(array) for name, array in inputs.items()}
            if ids_kind == "pt":
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
        store = self._intake.store
        return self._vision.merge([self._vision.process(item, store) for item in media])

    def check(
        self, given: Mapping[str, Any], placed: Sequence[MediaPlacement], rest: Sequence[int]
    ) -> str:
        """Return why inputs that user code computed are not those of the
        trainer; empty if they are.

        `rest` are the sample's ids after its last reply, which may have
        images that no reply follows.
        """
        trainer_inputs = self.inputs([block.media for block in placed])
        has_later_images = not self._vision.pad_ids.isdisjoint(rest)
        for name, values in given.items():
            expected = trainer_inputs.get(name)
            if expected is not None:
                difference = _difference(values, expected, has_later_images)
                if difference:
                    return f"{name} {difference}"
            elif values is not None and not has_later_images:
                names = ", ".join(trainer_inputs) or "no images"
                return f"{name} is none of the model's inputs here ({names})"

        missing = sorted(trainer_inputs.keys() - given.keys())
        return f"{', '.join(missing)} is missing" if missing else ""

    def _stored(self, images: Any, videos: Any) -> list[Media]:
        if videos:
            raise ValueError("processor: videos are not supported here; give images")
        if images is None:
            images = []
        elif not isinstance(images, (list, tuple)):
            images = [images]
        if not images:
            return []

        parts = tuple(image if isinstance(image, Image) else Image(image) for image in images)
        (message,) = self._intake.take_in((Message("user", parts),))
        return [*message.media]


def _difference(values: Any, expected: Any, more: bool) -> str:
    """Return how values differ from the trainer's; empty if they do not.

    With `more`, values of further images may follow.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)  # of a tensor, or an array
    first = array[: len(expected)]
    if first.shape != expected.shape or (len(array) > len(expected) and not more):
        return f"has the shape {tuple(array.shape)}, and the trainer's {tuple(expected.shape)}"

    largest = float(np.abs(first - expected.astype(np.float64)).max(initial=0.0))
    if largest <= TOLERANCE:
        return ""
    return f"differs by {largest:.3g} from what the trainer computes"


def pictures(task: Task) -> list[Any]:
    """Return the images of a row as Pillow images: those of its messages, else
    those for the environment."""
    images: list[Any] = []
    for message in task.messages:
        if not isinstance(message.content, str):
            images += [part for part in message.content if isinstance(part, (Image, ImageRef))]
    images = images or list(task.images)
    return [open_picture(image.value) if isinstance(image, Image) else image for image in images]


def open_picture(value: Any) -> Any:
    """Return an image of any form as a Pillow image in RGB."""
    from PIL import Image as Pillow

    if isinstance(value, Pillow.Image):
        return value.convert("RGB")
    return Pillow.fromarray(decode(value, MediaLimits()))
