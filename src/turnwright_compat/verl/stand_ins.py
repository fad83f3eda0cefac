"""What user code imports of verl where it is not installed: for each module of verl,
where its names are ours."""

TOOLS = "turnwright_compat.verl.tool_interface"
LOOPS = "turnwright_compat.verl.loop_interface"
GSM8K = "turnwright_compat.verl.gsm8k"
SCORES = "turnwright_compat.verl.scores"
PICTURES = "turnwright_compat.verl.pictures"

MODULES = {
    "verl.tools.schemas": {
        TOOLS: """
            OpenAIFunctionPropertySchema OpenAIFunctionParametersSchema OpenAIFunctionSchema
            OpenAIFunctionToolSchema OpenAIFunctionParsedSchema OpenAIFunctionCallSchema
            OpenAIFunctionToolCall ToolResponse
        """,
    },
    "verl.tools.base_tool": {TOOLS: "BaseTool OpenAIFunctionToolSchema ToolResponse"},
    "verl.tools.function_tool": {
        TOOLS: """
            FunctionTool FUNCTION_TOOL_REGISTRY function_tool get_function_tool
            OpenAIFunctionToolSchema
        """,
    },
    "verl.tools.gsm8k_tool": {
        GSM8K: "Gsm8kTool",
        TOOLS: "BaseTool OpenAIFunctionToolSchema ToolResponse",
    },
    "verl.interactions.base": {TOOLS: "BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {GSM8K: "Gsm8kInteraction", TOOLS: "BaseInteraction"},
    "verl.experimental.agent_loop.agent_loop": {
        LOOPS: """
            AgentLoopBase AgentLoopMetrics AgentLoopOutput DictConfigWrap LOOPS MergeResult
            ToolListWrap register
        """,
    },
    "verl.experimental.agent_loop": {
        LOOPS: "AgentLoopBase AgentLoopMetrics AgentLoopOutput register",
        "verl.experimental.agent_loop": "agent_loop",
    },
    "verl.workers.rollout.replica": {LOOPS: "TokenOutput"},
    "verl.utils.profiler": {LOOPS: "simple_timer"},
    "verl.utils.rollout_trace": {LOOPS: "rollout_trace_op"},
    "verl.utils.dataset.vision_utils": {PICTURES: "process_image process_video"},
    "verl.utils.reward_score": {
        SCORES: "default_compute_score get_default_compute_score MATH DAPO SEARCH",
    },
    "verl.utils.reward_score.gsm8k": {GSM8K: "compute_score extract_solution"},
    "verl.utils.reward_score.geo3k": {
        SCORES: "compute_score=geo3k_score acc_reward format_reward",
    },
    "verl.utils.reward_score.math_dapo": {
        SCORES: "compute_score=math_dapo_score normalize_final_answer",
    },
    "verl.utils.reward_score.math_reward": {
        SCORES: """
            compute_score=math_reward_score is_equiv last_boxed_only_string remove_boxed
            strip_string
        """,
    },
    "verl.utils.reward_score.math_verify": {SCORES: "compute_score=math_verify_score"},
    "verl.utils.reward_score.search_r1_like_qa_em": {
        SCORES: """
            compute_score=search_score extract_solution=extract_search_solution
            compute_score_subem count_answer_tags em_check normalize_answer subem_check
        """,
    },
}
