"""What user code imports of slime, Miles and SGLang: for each module, where its names are ours."""

TYPES = "turnwright_compat.slime.interfaces"
HELPERS = "turnwright_compat.slime.utilities"
RULES = "turnwright_compat.slime.reward_rules"
GENERATION = "turnwright_compat.slime.generation"
CALLS = "turnwright_compat.slime.function_calls"

ALWAYS = ("slime", "miles")
"""Used where the frameworks are installed too: the originals of these modules need Ray and servers
of the trainer. What a stand-in lacks is the installed framework's."""

MODULES = {
    "slime.utils.types": {TYPES: "Sample Status _Status"},
    "slime.utils.http_utils": {HELPERS: "get post"},
    "slime.utils.misc": {HELPERS: "SingletonMeta load_function"},
    "slime.utils.processing_utils": {
        HELPERS: """
            build_processor_kwargs encode_image_for_rollout_engine load_processor load_tokenizer
            process_vision_info
        """,
    },
    "slime.utils.async_utils": {HELPERS: "run"},
    "slime.observability.trace_utils": {
        HELPERS: """
            TraceSpanContext bind_trace build_sglang_meta_trace_attrs trace_event trace_function
            trace_span
        """,
    },
    "slime.rollout.base_types": {TYPES: "RolloutFnEvalOutput RolloutFnTrainOutput"},
    "slime.rollout.filter_hub.base_types": {TYPES: "DynamicFilterOutput"},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        TYPES: """
            DynamicFilterOutput SMALLEST check_no_aborted check_reward_nonzero_std
            check_reward_nonzero_std_with_fallback
        """,
    },
    "slime.rollout.rm_hub.math_utils": {
        RULES: """
            extract_answer extract_boxed_answer grade_answer_mathd grade_answer_sympy
            grade_answer_verl last_boxed_only_string mathd_normalize_answer remove_boxed
        """,
    },
    "slime.rollout.rm_hub.deepscaler": {
        RULES: """
            get_deepscaler_rule_based_reward get_gemma_math_reward extract_answer
            grade_answer_mathd grade_answer_sympy
        """,
    },
    "slime.rollout.rm_hub.math_dapo_utils": {RULES: "compute_score normalize_final_answer"},
    "slime.rollout.rm_hub.f1": {RULES: "CLOSED f1_score normalize_answer"},
    "slime.rollout.rm_hub.gpqa": {RULES: "LETTERS compute_gpqa_reward"},
    "slime.rollout.rm_hub.ifbench": {RULES: "compute_ifbench_reward"},
    "slime.rollout.rm_hub": {
        RULES: """
            async_rm batched_async_rm BOXED BY_CONTENT REMOTE RULES compute_gpqa_reward
            compute_ifbench_reward compute_score extract_answer f1_score
            get_deepscaler_rule_based_reward get_gemma_math_reward grade_answer_verl
        """,
        HELPERS: "load_function post",
        "slime.rollout.rm_hub": "deepscaler f1 gpqa ifbench math_dapo_utils math_utils",
    },
    "slime.rollout.sglang_rollout": {
        GENERATION: "GenerateState generate generate_rollout get_model_url",
        HELPERS: "build_processor_kwargs encode_image_for_rollout_engine post",
    },
    "slime.rollout.sglang_streaming_rollout": {GENERATION: "generate_streaming=generate"},
    "slime.rollout.sft_rollout": {GENERATION: "generate_rollout=read_replies"},
    "slime.rollout.fully_async_rollout": {
        GENERATION: "FullyAsyncRolloutFn generate_rollout_fully_async",
    },
    # Miles, where it is not as slime.
    "miles.rollout.base_types": {
        TYPES: """
            GenerateFnInput GenerateFnOutput RolloutFnConstructorInput RolloutFnEvalInput
            RolloutFnEvalOutput RolloutFnInput RolloutFnOutput RolloutFnTrainInput
            RolloutFnTrainOutput
        """,
    },
    "miles.utils.processing_utils": {
        HELPERS: """
            build_processor_kwargs call_processor encode_image_for_rollout_engine
            extract_multimodal_train_inputs load_processor load_tokenizer process_vision_info
        """,
    },
    "miles.rollout.generate_utils.generate_endpoint_utils": {
        GENERATION: """
            compute_prompt_ids_from_sample compute_request_payload compute_routing_headers
            update_sample_from_response
        """,
        HELPERS: """
            call_processor encode_image_for_rollout_engine extract_multimodal_train_inputs
        """,
    },
    "miles.rollout.generate_utils.tool_call_utils": {
        GENERATION: """
            create_tool_call_parser execute_tool_calls tokenize_tool_responses
            update_sample_with_tool_responses
        """,
        "sglang.srt.entrypoints.openai.protocol": "Tool",
        "sglang.srt.function_call.function_call_parser": "FunctionCallParser",
    },
    "miles.rollout.generate_hub.single_turn": {
        GENERATION: "generate=generate_single_turn one_reply=generate",
        TYPES: "GenerateFnInput GenerateFnOutput",
    },
    "miles.rollout.generate_hub.multi_turn": {
        GENERATION: """
            generate=generate_multi_turn compute_prompt_ids_from_sample compute_request_payload
            create_tool_call_parser execute_tool_calls update_sample_from_response
            update_sample_with_tool_responses
        """,
        TYPES: "GenerateFnInput GenerateFnOutput",
        HELPERS: "load_function post",
    },
    "miles.rollout.generate_hub.agentic_tool_call": {GENERATION: "generate=generate_by_agent"},
    "miles.rollout.inference_rollout.inference_rollout_common": {
        GENERATION: "GenerateState InferenceRolloutFn generate",
        TYPES: "RolloutFnConstructorInput",
    },
    "sglang.srt.entrypoints.openai.protocol": {CALLS: "Function Tool"},
    "sglang.srt.function_call.core_types": {CALLS: "ToolCallItem"},
    "sglang.srt.function_call.function_call_parser": {
        CALLS: "FORMATS FunctionCallParser THOUGHT Tool ToolCallItem",
    },
    # Under an older name.
    "sglang.srt.managers.io_struct": {"sglang.srt.entrypoints.openai.protocol": "Function Tool"},
    "examples.geo3k_vlm_multi_turn.base_env": {TYPES: "BaseInteractionEnv"},
}

SAME = {
    "miles": "slime",
    "examples.geo3k_vlm": "examples",
    "examples.geo3k_vlm.multi_turn": "examples.geo3k_vlm_multi_turn",
}
"""Modules that are other ones, where they are not above, and so are the modules below them."""
