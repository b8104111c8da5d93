"""Evaluation of trained models: likelihood, tasks, suites, lm-evaluation-harness, generation and classifiers."""
