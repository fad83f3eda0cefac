"""Processor and images of user code, as slime's."""

from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    process_vision_info,
)


def call_processor(processor, text, multimodal_inputs=None):
    """Call a processor with the arguments that Miles gives it."""
    return processor(text=text, **build_processor_kwargs(multimodal_inputs))


def extract_multimodal_train_inputs(processor_output):
    """Return what a processor made besides ids and masks; None if that is nothing."""
    return {key: value for key, value in processor_output.items() if key not in ("input_ids", "attention_mask")} or None


__all__ = [
    "build_processor_kwargs",
    "call_processor",
    "encode_image_for_rollout_engine",
    "extract_multimodal_train_inputs",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]
