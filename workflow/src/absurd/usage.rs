//! Token counts and finish reasons, in the spellings of other libraries.

use crate::record::{FinishReason, Usage};
use serde_json::Value;

/// Reads usage in any of the known forms. `None`: the value has none of them, so the usage is unknown.
pub fn usage_of(value: &Value) -> Option<Usage> {
    let count = |keys: &[&str]| {
        keys.iter().find_map(|key| value[*key].as_f64()).map(|n| n.clamp(0.0, f64::from(i32::MAX)) as i64)
    };
    let input = count(&["inputTokens", "promptTokens", "input", "input_tokens", "prompt_tokens"]);
    let output = count(&["outputTokens", "completionTokens", "output", "output_tokens", "completion_tokens"]);
    if input.is_none() && output.is_none() {
        return None;
    }
    let cached = count(&[
        "cachedInputTokens",
        "cachedTokens",
        "cacheRead",
        "cache_read_input_tokens",
        "cached_tokens",
    ]);
    let written = count(&[
        "cacheWrite",
        "cacheCreationInputTokens",
        "cache_creation_input_tokens",
        "cache_write_tokens",
    ]);
    let (cached, written) = (cached.unwrap_or(0), written.unwrap_or(0));
    // pi-ai and Anthropic count the cached tokens apart.
    let apart = value.get("input").is_some() || value.get("cache_read_input_tokens").is_some();
    let micros = |amount: f64| amount.clamp(0.0, 1e12).round() as i64;
    let cost = match (value["costCents"].as_f64(), value["cost"]["total"].as_f64().or(value["cost"].as_f64()))
    {
        (Some(cents), _) => micros(cents * 10_000.0),
        (None, Some(dollars)) => micros(dollars * 1_000_000.0),
        (None, None) => 0,
    };
    Some(Usage {
        input_tokens: (input.unwrap_or(0) + if apart { cached + written } else { 0 })
            .min(i64::from(i32::MAX)),
        output_tokens: output.unwrap_or(0),
        cached_tokens: cached,
        cache_write_tokens: written,
        cost_micros: cost,
    })
}

/// Reads a finish reason in any of the known spellings.
pub fn finish_of(word: &str) -> Option<FinishReason> {
    Some(match word {
        "stop" | "end_turn" | "stop_sequence" => FinishReason::Stop,
        "tool-calls" | "tool_calls" | "toolUse" | "tool_use" => FinishReason::ToolCalls,
        "length" | "max_tokens" => FinishReason::Length,
        "content-filter" | "content_filter" | "refusal" => FinishReason::ContentFilter,
        _ => return None,
    })
}
