"""What user code imports of TRL where it is not installed: for each module of TRL,
where its names are ours."""

NAMES = "turnwright_compat.trl.names"
REWARDS = "turnwright_compat.trl.rewards"

MODULES = {
    # `__getattr__` makes a stand-in of any other name.
    "trl": {NAMES: "GRPOConfig GRPOTrainer AsyncGRPOTrainer RLOOTrainer __getattr__"},
    "trl.rewards": {
        REWARDS: """
            accuracy_reward reasoning_accuracy_reward get_cosine_scaled_reward
            think_format_reward get_repetition_penalty_reward get_soft_overlong_punishment
        """,
        "trl.rewards": "",
    },
}
