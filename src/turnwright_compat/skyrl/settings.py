"""What generators and environments read of SkyRL's configuration, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class BaseConfig:
    """Part of the configuration."""


@dataclass
class SamplingParams(BaseConfig):
    """How replies are sampled."""

    max_generate_length: int = 1024
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    logprobs: int | None = 1
    stop: list[str] | None = None
    additional_kwargs: dict[str, Any] | None = None


@dataclass
class ChatTemplateConfig(BaseConfig):
    """Chat template in place of the tokenizer's."""

    source: str = "name"
    name_or_path: str | None = None


@dataclass
class InferenceEngineConfig(BaseConfig):
    """Engine, as far as generators ask for it."""

    backend: str = "vllm"
    num_engines: int = 1
    enable_return_routed_experts: bool = False
    enable_prefix_caching: bool = True
    served_model_name: str | None = None
    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class GeneratorConfig(BaseConfig):
    """Generation of episodes."""

    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    n_samples_per_prompt: int = 5
    batched: bool = False
    max_turns: int = 1
    max_input_length: int | None = None
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    use_conversation_multi_turn: bool = True
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    eval_sampling_params: SamplingParams | None = None
    eval_n_samples_per_prompt: int = 1
    zero_reward_on_non_stop: bool = False
    use_cache_salt: bool = True
    apply_overlong_filtering: bool = False
    step_wise_trajectories: bool = False
    vision_language_generator: bool = False
    merge_stepwise_output: bool = False


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Environments; settings of one are under its id."""

    max_env_workers: int = 32


@dataclass
class EnvironmentConfig(BaseConfig):
    """Environment of rows that name none."""

    env_class: str = "gsm8k"
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
