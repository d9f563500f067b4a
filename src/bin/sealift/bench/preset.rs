//! The shapes of real KV caches, from the `config.json` that each model is published with.

use clap::ValueEnum;

use super::report;

/// A model whose KV cache is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Preset {
    #[value(name = "llama-3.1-8b")]
    Llama31_8b,
    #[value(name = "llama-3.1-70b")]
    Llama31_70b,
    #[value(name = "qwen3-8b")]
    Qwen3_8b,
    #[value(name = "qwen3-32b")]
    Qwen3_32b,
    #[value(name = "glm-4.5")]
    Glm45,
    #[value(name = "glm-4.5-air")]
    Glm45Air,
    #[value(name = "deepseek-v3")]
    DeepseekV3,
}

/// What of a model decides how its KV cache looks. All are bf16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) name: &'static str,
    /// `num_hidden_layers`.
    pub(super) layers: u16,
    /// Planes of a layer: K and V, or the one latent of MLA.
    pub(super) planes_per_layer: u16,
    /// Elements of a token in one plane.
    pub(super) elements: u32,
}

impl Model {
    /// Grouped-query attention: `num_key_value_heads` heads of `head_dim` (where the config has
    /// none, `hidden_size / num_attention_heads`), K and V apart.
    const fn gqa(name: &'static str, layers: u16, kv_heads: u32, head_dim: u32) -> Model {
        Model { name, layers, planes_per_layer: 2, elements: kv_heads * head_dim }
    }

    /// Multi-head latent attention: `kv_lora_rank` and `qk_rope_head_dim` side by side.
    const fn mla(name: &'static str, layers: u16, lora_rank: u32, rope_dim: u32) -> Model {
        Model { name, layers, planes_per_layer: 1, elements: lora_rank + rope_dim }
    }

    pub(super) fn planes(&self) -> u16 {
        self.layers * self.planes_per_layer
    }

    /// Bytes of a token in one plane: an element of bf16 is two.
    pub(super) fn plane_bytes_per_token(&self) -> u32 {
        self.elements * 2
    }

    fn bytes_per_token(&self) -> u32 {
        self.plane_bytes_per_token() * u32::from(self.planes())
    }
}

impl Preset {
    /// The published numbers.
    pub(super) fn model(self) -> Model {
        match self {
            // meta-llama/Llama-3.1-8B: num_hidden_layers 32, num_key_value_heads 8,
            // hidden_size 4096 / num_attention_heads 32 = 128.
            Preset::Llama31_8b => Model::gqa("llama-3.1-8b", 32, 8, 128),
            // meta-llama/Llama-3.1-70B: num_hidden_layers 80, num_key_value_heads 8,
            // hidden_size 8192 / num_attention_heads 64 = 128.
            Preset::Llama31_70b => Model::gqa("llama-3.1-70b", 80, 8, 128),
            // Qwen/Qwen3-8B: num_hidden_layers 36, num_key_value_heads 8, head_dim 128.
            Preset::Qwen3_8b => Model::gqa("qwen3-8b", 36, 8, 128),
            // Qwen/Qwen3-32B: num_hidden_layers 64, num_key_value_heads 8, head_dim 128.
            Preset::Qwen3_32b => Model::gqa("qwen3-32b", 64, 8, 128),
            // zai-org/GLM-4.5: num_hidden_layers 92, num_key_value_heads 8, head_dim 128.
            Preset::Glm45 => Model::gqa("glm-4.5", 92, 8, 128),
            // zai-org/GLM-4.5-Air: num_hidden_layers 46, num_key_value_heads 8, head_dim 128.
            Preset::Glm45Air => Model::gqa("glm-4.5-air", 46, 8, 128),
            // deepseek-ai/DeepSeek-V3: num_hidden_layers 61, kv_lora_rank 512,
            // qk_rope_head_dim 64. Its layer for multi-token prediction isn't counted.
            Preset::DeepseekV3 => Model::mla("deepseek-v3", 61, 512, 64),
        }
    }
}

/// Prints all of them.
pub(super) fn list() {
    let head =
        ["preset", "layers", "planes", "elements", "plane B/token", "B/token", "8192 tokens"];
    let row = |preset: &Preset| {
        let model = preset.model();
        vec![
            model.name.to_owned(),
            model.layers.to_string(),
            model.planes().to_string(),
            model.elements.to_string(),
            model.plane_bytes_per_token().to_string(),
            report::grouped(u64::from(model.bytes_per_token())),
            report::size(u64::from(model.bytes_per_token()) * 8192),
        ]
    };
    println!("{}", report::table(&head, Preset::value_variants().iter().map(row)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_per_token_are_the_published_ones() {
        let bytes = |preset: Preset| preset.model().bytes_per_token();
        assert_eq!(bytes(Preset::Llama31_8b), 128 * 1024);
        assert_eq!(bytes(Preset::Llama31_70b), 320 * 1024);
        assert_eq!(bytes(Preset::DeepseekV3), 61 * 576 * 2);
        assert_eq!(Preset::Llama31_8b.model().planes(), 64);
        assert_eq!(Preset::DeepseekV3.model().planes(), 61);
    }
}
