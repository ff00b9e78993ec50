//! What a provider says of a failure, and the [`Fault`] that it means. The providers report errors as
//! `{"error": {"message", "type", "code"}}`, so one function reads them.

use serde_json::Value;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::without_nul;

const MAX_MESSAGE_CHARS: usize = 500;

/// A provider's description of a failure.
#[derive(Debug)]
pub struct ProviderError {
    kind: String,
    code: String,
    message: String,
}

impl ProviderError {
    /// Reads `{"error": …}`. The error is an object, or a string with some servers.
    pub fn read(body: &[u8]) -> Option<ProviderError> {
        let body: Value = serde_json::from_slice(body).ok()?;
        ProviderError::of(&body)
    }

    /// Like [`ProviderError::read`], for an event that is parsed already.
    pub fn of(body: &Value) -> Option<ProviderError> {
        let error = body.get("error").filter(|error| !error.is_null())?;
        let text = |field: &str| match error.get(field) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Number(number)) => number.to_string(),
            _ => String::new(),
        };
        let message = error.as_str().map_or_else(|| text("message"), str::to_owned);
        Some(ProviderError { kind: shorten(&text("type")), code: text("code"), message: shorten(&message) })
    }

    pub(super) fn plain(body: &[u8]) -> ProviderError {
        let message = shorten(&String::from_utf8_lossy(body));
        ProviderError { kind: String::new(), code: String::new(), message }
    }

    /// Returns the HTTP status that matches an error inside a stream.
    pub fn status(&self) -> u16 {
        let known = |word: &str| {
            Some(match word {
                "invalid_request_error" | "context_length_exceeded" => 400,
                "authentication_error" | "invalid_api_key" => 401,
                "billing_error" => 402,
                "permission_error" => 403,
                "not_found_error" | "model_not_found" => 404,
                "request_too_large" => 413,
                "rate_limit_error" | "rate_limit_exceeded" | "insufficient_quota" => 429,
                "timeout_error" => 504,
                "overloaded_error" => 529,
                _ => return None,
            })
        };
        let number = self.code.parse().ok().filter(|code| (400..600).contains(code));
        known(&self.code).or_else(|| known(&self.kind)).or(number).unwrap_or(500)
    }

    /// Returns the fault that the error means.
    pub fn fault(self, status: u16, retry_after_ms: Option<u64>) -> Fault {
        let overflows = status == 413
            || (matches!(status, 400 | 422) && self.is_overflow())
            || (status == 429 && self.is_above_the_account());
        // An account without credit also answers 429, but waiting does not help.
        let exhausted = [&self.code, &self.kind].iter().any(|word| *word == "insufficient_quota");
        let message = if self.message.is_empty() { self.kind } else { self.message };
        match status {
            _ if overflows => Fault::ContextOverflow { message },
            429 if exhausted => Fault::Refused { status, message },
            429 => Fault::RateLimited { retry_after_ms },
            408 | 425 | 500..=599 => Fault::Overloaded { status, message, retry_after_ms },
            401 | 403 => Fault::Unauthorized { message },
            404 => Fault::UnknownModel { message },
            _ => Fault::Refused { status, message },
        }
    }

    /// OpenAI answers 429 to a request of more tokens than the account may send in a minute. It never succeeds, however long one
    /// waits; a shorter one does.
    fn is_above_the_account(&self) -> bool {
        let message = self.message.to_lowercase();
        message.starts_with("request too large") || message.contains("must be reduced in order to run")
    }

    fn is_overflow(&self) -> bool {
        const PHRASES: [&str; 7] = [
            "prompt is too long",
            "exceed context limit",
            "maximum context length",
            "context length exceeded",
            "context window",
            "available context size",
            "request_too_large",
        ];
        let message = self.message.to_lowercase();
        self.code == "context_length_exceeded" || PHRASES.iter().any(|phrase| message.contains(phrase))
    }
}

/// Returns the fault of an answer that violates its protocol.
pub fn bad_response(message: impl std::fmt::Display) -> Fault {
    Fault::BadResponse { message: shorten(&message.to_string()) }
}

/// Shortens the message and removes NUL, because the message is stored.
pub(super) fn shorten(message: &str) -> String {
    without_nul(message.trim().chars().take(MAX_MESSAGE_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_is_recognised_in_the_words_of_each_provider() {
        let bodies = [
            r#"{"error":{"type":"invalid_request_error","message":"prompt is too long: 210000 tokens > 200000 maximum"}}"#,
            r#"{"error":{"type":"invalid_request_error","message":"input length and `max_tokens` exceed context limit: 1 + 2 > 2"}}"#,
            r#"{"error":{"code":"context_length_exceeded","message":"too long"}}"#,
            r#"{"error":{"code":400,"message":"This model's maximum context length is 4096 tokens."}}"#,
            r#"{"error":{"code":400,"message":"the request exceeds the available context size"}}"#,
        ];
        for body in bodies {
            let error = ProviderError::read(body.as_bytes()).unwrap();
            assert!(matches!(error.fault(400, None), Fault::ContextOverflow { .. }), "{body}");
        }
        assert!(matches!(ProviderError::plain(b"").fault(413, None), Fault::ContextOverflow { .. }));
    }

    #[test]
    fn an_empty_account_is_not_taken_for_a_rate_limit() {
        let body = br#"{"error":{"code":"insufficient_quota","message":"You exceeded your current quota"}}"#;
        let fault = ProviderError::read(body).unwrap().fault(429, Some(1));
        assert!(matches!(fault, Fault::Refused { status: 429, .. }));
    }
}
