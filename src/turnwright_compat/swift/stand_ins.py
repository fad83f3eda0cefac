"""What user code imports of ms-swift where it is not installed: for each module,
where its names are ours.

Where the names of a module are those of another module of ms-swift, they are the installed one's if
there is one: registries must be those of the ms-swift that runs.
"""

PROTOCOL = "turnwright_compat.swift.protocol"
REWARDS = "turnwright_compat.swift.rewards"
ENVIRONMENTS = "turnwright_compat.swift.environments"
SCHEDULERS = "turnwright_compat.swift.schedulers"
PLUGIN_NAMES = "turnwright_compat.swift.plugin_names"

MODULES = {
    "swift.infer_engine.protocol": {
        PROTOCOL: """
            ChatCompletionResponse ChatCompletionResponseChoice ChatMessage InferRequest
            RequestConfig RolloutInferRequest RolloutOutput RolloutResponseChoice UsageInfo
        """,
    },
    "swift.infer_engine": {
        PROTOCOL: """
            InferRequest PtEngine RequestConfig RolloutInferRequest TransformersEngine
        """,
        "swift.infer_engine": "protocol",
    },
    "swift.loss_scale": {
        PLUGIN_NAMES: "ALL_BASE_STRATEGY LossScale loss_scale_map",
        "swift.loss_scale": "",
    },
    "swift.template": {PLUGIN_NAMES: "Messages Template Tool", "swift.template": ""},
    "swift.utils": {PLUGIN_NAMES: "get_logger remove_response to_device", "swift.utils": ""},
    "swift.rewards.orm": {
        REWARDS: """
            ORM AsyncORM CosineReward Format MathAccuracy ReActFormat ReactORM RepetitionPenalty
            SoftOverlong orms
        """,
    },
    "swift.rewards.prm": {REWARDS: "PRM prms"},
    "swift.rewards.rm_plugin": {REWARDS: "DefaultRMPlugin rm_plugins"},
    "swift.rewards": {
        REWARDS: "ORM AsyncORM PRM orms prms rm_plugins __getattr__",
        "swift.rewards": "orm prm rm_plugin",
    },
    "swift.rollout.openenv_wrapper": {ENVIRONMENTS: "OpenEnvWrapper"},
    "swift.rollout.gym_env": {
        ENVIRONMENTS: "Env SimpleMathEnv envs MathAccuracy RolloutInferRequest",
    },
    "swift.rollout.multi_turn": {
        SCHEDULERS: """
            GYMScheduler MathTipsMultiTurnScheduler MathTipsScheduler MultiTurnScheduler
            OpenEnvScheduler RolloutScheduler SingleTurnScheduler ThinkingModelTipsScheduler
            multi_turns OpenEnvWrapper envs MathAccuracy Messages RolloutInferRequest
            RolloutOutput remove_response
        """,
    },
    "swift.rollout": {
        ENVIRONMENTS: "Env envs",
        SCHEDULERS: "MultiTurnScheduler RolloutScheduler multi_turns",
        "swift.rollout": "gym_env multi_turn openenv_wrapper",
    },
    # Names of release 3.6.
    "swift.llm": {
        "swift.infer_engine": "InferRequest PtEngine RequestConfig RolloutInferRequest",
        "swift.template": "Messages Template",
        "swift.utils": "to_device",
    },
    "swift.llm.infer.protocol": {
        "swift.infer_engine.protocol": """
            ChatCompletionResponse ChatCompletionResponseChoice ChatMessage RequestConfig
            RolloutInferRequest RolloutResponseChoice=ChatCompletionResponseChoice
        """,
    },
    "swift.plugin": {
        "swift.rewards": "ORM PRM AsyncORM orms prms rm_plugins",
        "swift.rollout.gym_env": "Env envs",
        "swift.rollout.multi_turn": "MultiTurnScheduler multi_turns",
    },
}

SAME = {
    "swift.plugin.env": "swift.rollout.gym_env",
    "swift.plugin.multi_turn": "swift.rollout.multi_turn",
    "swift.plugin.orm": "swift.rewards.orm",
    "swift.plugin.rm_plugin": "swift.rewards.rm_plugin",
}
"""Modules that are other ones, under an older name, and so are the modules below them."""
