"""A language model that writes each continuation several times, each under another draw of its attention.

    python examples/sampled_generation.py

No training: `bayesianize` and `generate` are all it takes. A tiny random Llama stands in for yours; with random weights
it has no opinion worth having, so look at the shape of the answer, not at the tokens.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bayesattn as ba
from bayesattn.convert import bayesianize
from bayesattn.integrations.hf import SampledGenerations, generate


def main(num_samples: int) -> SampledGenerations:
    """Generate and print what the draws agree on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # far from uniform attention, as in a trained model
                parameter.mul_(10.0)
    bayesianize(model, ba.AttentionConfig("BAM-NOKL", weibull_k=3.0))
    # two prompts, the first padded on the left
    prompts = torch.tensor([[0, 0, 9, 8, 7], [5, 4, 3, 11, 12]])
    inputs = {"input_ids": prompts, "attention_mask": (prompts != 0).long()}
    result = generate(model, inputs, num_samples, seed=0, max_new_tokens=8, do_sample=False)
    for i in range(len(prompts)):
        print(f"prompt {i}: mean token entropy {result.mean_token_entropy[i]:.2f} nats, disagreement "
              f"{result.disagreement[i]:.2f}, variance of log p {result.log_prob_variance[i]:.2f}")  # fmt: skip
        for tokens in result.tokens[:, i].unique(dim=0)[:3]:
            print("   ", tokens.tolist())
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8)
    main(parser.parse_args().samples)
