"""What user code imports of SkyRL where it is not installed: for each module,
where its names are ours."""

GYM = "turnwright_compat.skyrl.gym_interface"
GYM_TOOLS = "turnwright_compat.skyrl.gym_tools"
GENERATORS = "turnwright_compat.skyrl.generator_interface"
ROWS = "turnwright_compat.skyrl.generator_rows"
SETTINGS = "turnwright_compat.skyrl.settings"

MODULES = {
    "skyrl_gym.core": {GYM: "Env EnvStepOutput ObsType ActType"},
    "skyrl_gym.error": {GYM: "Error RegistrationError"},
    "skyrl_gym.metrics": {GYM: "aggregate_for_environment default_aggregate_metrics"},
    "skyrl_gym.envs.base_text_env": {
        GYM: """
            BaseTextEnv BaseTextEnvStepOutput ConversationType MessageType Env
            default_aggregate_metrics
        """,
    },
    "skyrl_gym.envs.registration": {
        GYM: """
            EnvSpec deregister load_env_creator make pprint_registry register registry spec
        """,
    },
    "skyrl_gym.envs": {GYM: "deregister register", "skyrl_gym.envs": "registration"},
    "skyrl_gym.tools.core": {GYM_TOOLS: "ToolGroup tool"},
    "skyrl_gym.tools.python": {GYM_TOOLS: "PythonCodeExecutorToolGroup ToolGroup tool"},
    "skyrl_gym.tools.search": {GYM_TOOLS: "SearchToolGroup ToolGroup tool"},
    "skyrl_gym.tools": {
        GYM_TOOLS: "PythonCodeExecutorToolGroup SearchToolGroup ToolGroup tool",
        "skyrl_gym.tools": "core python search",
    },
    "skyrl_gym": {
        GYM: "Env make pprint_registry register registry spec",
        "skyrl_gym": "core envs error tools",
    },
    "skyrl.backends.skyrl_train.inference_servers.base": {
        GENERATORS: """
            ConversationType MessageType InferenceEngineInput InferenceEngineInterface
            InferenceEngineOutput
        """,
    },
    "skyrl.backends.skyrl_train.inference_servers.engine_utils": {
        GENERATORS: "get_sampling_params_for_backend",
    },
    "skyrl.train.generators.base": {
        GENERATORS: """
            BatchMetadata ConversationType GeneratorInput GeneratorInterface GeneratorOutput
            TrainingPhase TrajectoryID
        """,
    },
    "skyrl.train.generators.utils": {
        ROWS: """
            ConversationType apply_overlong_filtering encode_messages_subset
            get_generation_prompt_ids get_response_ids_and_loss_mask_from_messages
            get_rollout_metrics
        """,
    },
    "skyrl.train.config.config": {
        SETTINGS: """
            BaseConfig ChatTemplateConfig EnvironmentConfig GeneratorConfig
            InferenceEngineConfig SamplingParams SkyRLGymConfig
        """,
    },
    "skyrl.train.config": {
        SETTINGS: """
            BaseConfig ChatTemplateConfig EnvironmentConfig GeneratorConfig
            InferenceEngineConfig SamplingParams SkyRLGymConfig
        """,
        "skyrl.train.config": "config",
    },
    # Under its name before SkyRL 0.2.
    "skyrl_train.generators.base": {
        "skyrl.train.generators.base": """
            BatchMetadata ConversationType GeneratorInput GeneratorInterface GeneratorOutput
            TrainingPhase TrajectoryID
        """,
    },
}
