"""The smallest pipeline file that explores, as text: a test that wants another key changes it."""

from __future__ import annotations

EXPLORING = """
project: tests
name: small
checkpoint_root_dir: runs
algorithm: {algorithm_type: grpo}
model: {model_path: synthetic://qwen2-1m, max_prompt_tokens: 48, max_response_tokens: 16}
buffer:
  batch_size: 4
  total_steps: 2
  default_workflow_type: math_workflow
  explorer_input:
    taskset: {path: synthetic://gsm8k, format: {prompt_key: question, response_key: answer}}
explorer: {rollout_model: {engine_type: fake}}
"""
