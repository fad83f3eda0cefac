"""Training: credit assignment, loss, optimizer, checkpoints and models. The package with the tensors."""

from turnwright._lazy import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "advantages": "TRAINED Credit trainable_tokens",
        "algorithms": "resolve_settings",
        "checkpoint": "Checkpoints",
        "forward.batch": "LossDenominator Ranks make_batch",
        "forward.forward": "LogitDistribution",
        "forward.prefix_tree": "build_prefix_tree",
        "model.lora": "add_lora",
        "model.models": "create_tiny_model",
        "run": "TrainingRun",
        "server": "make_service",
        "setup": "load_model_and_renderer make_adapter_engines make_engine score_with_model unique_weights",
        "task_plan": "TaskPlan",
        "trainer.trainer": "StepResult Trainer",
        "weight_transfer": "GroupWeightPacker RequestWeightPacker",
    },
)
