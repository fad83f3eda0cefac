"""Models: loading and creating them, LoRA, the reference policy, and export of weights."""
