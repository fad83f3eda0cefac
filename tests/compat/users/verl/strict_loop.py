"""A loop whose constructor names its arguments."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase


class StrictLoop(AgentLoopBase):
    def __init__(
        self,
        trainer_config,
        server_manager,
        tokenizer,
        processor,
        dataset_cls,
        data_config,
        rounds=1,
    ):
        super().__init__(
            trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config
        )
        self.rounds = rounds

    async def run(self, sampling_params, **kwargs):
        raise NotImplementedError
