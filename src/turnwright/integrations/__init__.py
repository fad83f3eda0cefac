"""Our rollouts inside the trainers of other frameworks: one module for each."""
