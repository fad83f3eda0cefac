"""A renderer with the methods of a Hugging Face tokenizer, for user code that expects one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwright.errors import UsageError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.types import ImageRef, VideoRef, as_messages

_IMAGE = ImageRef("placeholder", 1, 1)
_MEDIA = {"image": _IMAGE, "video": VideoRef((_IMAGE,), (0.0,))}


class TokenizerFace:
    """Methods of `transformers.PreTrainedTokenizerFast` that loops of users call, over
    the renderer of the run.

    Texts are encoded with the control tokens that they contain, and without a beginning-of-sequence
    id, as `add_special_tokens=False` does; `apply_chat_template` writes what the template writes.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._codec, self._template = renderer.codec, renderer.template
        self.all_special_ids = sorted(renderer.special_ids)
        self.name_or_path = "" if renderer.directory is None else str(renderer.directory)
        """Directory of the model's tokenizer; empty for a renderer that was made in memory."""
        self.chat_template = renderer.template.source

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenizerFace:
        """Return itself: user code copies settings that have it, and it never changes."""
        return self

    def __call__(self, text: str | Sequence[str], **_: Any) -> dict[str, Any]:
        """Encode a text, or several: `input_ids` and `attention_mask`."""
        ids = self.encode(text) if isinstance(text, str) else [self.encode(one) for one in text]
        mask = [1] * len(ids) if isinstance(text, str) else [[1] * len(one) for one in ids]  # type: ignore[arg-type]
        return {"input_ids": ids, "attention_mask": mask}

    def __len__(self) -> int:
        return self._codec.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._codec.vocab_size

    def encode(self, text: str, **_: Any) -> list[int]:
        """Encode a text; control tokens in it become their ids."""
        return list(self._codec.encode(text))

    def decode(
        self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False, **_: Any
    ) -> str:
        """Decode ids."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(one) for one in token_ids]
        special = self._renderer.special_ids if skip_special_tokens else frozenset()
        return self._renderer.decode([one for one in ids if one not in special])

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Decode several rows of ids."""
        return [self.decode(ids, **options) for ids in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a control token, or of each; None for other texts."""
        if isinstance(tokens, str):
            return self._codec.control.get(tokens)
        return [self._codec.control.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the text of an id, or of each."""
        return self.decode([ids]) if isinstance(ids, int) else [self.decode([one]) for one in ids]

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **_: Any,
    ) -> Any:
        """Render a conversation to ids, or with `tokenize=False` to text. Images become the
        template's placeholders.

        Raises:
            UsageError: for several conversations at once.
        """
        if conversation and isinstance(conversation[0], (list, tuple)):
            raise UsageError(
                "apply_chat_template takes one conversation here; call it once for each"
            )
        messages = as_messages([_with_media(message) for message in conversation])
        text = self._template.render(
            messages, tuple(tools or ()), generation_prompt=add_generation_prompt
        )
        if not tokenize:
            return text
        return self(text) if return_dict else self.encode(text)

    def _token(self, name: str) -> str | None:
        value = self._template.variables.get(name)
        return value if isinstance(value, str) else None

    @property
    def bos_token(self) -> str | None:
        """Beginning-of-sequence token of the template."""
        return self._token("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Its id."""
        return self._codec.control.get(self.bos_token or "")

    @property
    def eos_token_id(self) -> int:
        """Id that ends a reply."""
        named = self._codec.control.get(self._token("eos_token") or "")
        return named if named in self._renderer.stop_ids else min(self._renderer.stop_ids)

    @property
    def eos_token(self) -> str:
        """Token that ends a reply."""
        return self.decode([self.eos_token_id])

    @property
    def pad_token(self) -> str:
        """Padding token; the end token where the template names none."""
        return self._token("pad_token") or self.eos_token

    @property
    def pad_token_id(self) -> int:
        """Its id."""
        return self._codec.control.get(self.pad_token, self.eos_token_id)


def _with_media(message: Any) -> Any:
    """Return a message whose parts `{"type": "image"}`, with or without an image, are references:
    only places are rendered."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), (list, tuple)):
        return message
    parts = [
        _MEDIA.get(str(part.get("type")).partition("_")[0], part)
        if isinstance(part, Mapping)
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}
