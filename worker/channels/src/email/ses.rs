//! Sends mail through Amazon SES. Only in builds with the feature `ses`.
//!
//! SES has no idempotency key: the same mail twice is sent twice. So a delivery that was interrupted is shown
//! as uncertain and not sent again.

use super::compose::compose;
use async_trait::async_trait;
use aws_sdk_sesv2::Client;
use aws_sdk_sesv2::config::interceptors::BeforeTransmitInterceptorContextRef;
use aws_sdk_sesv2::config::retry::RetryConfig;
use aws_sdk_sesv2::config::timeout::TimeoutConfig;
use aws_sdk_sesv2::config::{BehaviorVersion, ConfigBag, Intercept, Region, RuntimeComponents};
use aws_sdk_sesv2::error::{BoxError, DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_sesv2::operation::send_email::SendEmailError;
use aws_sdk_sesv2::primitives::Blob;
use aws_sdk_sesv2::types::{Destination, EmailContent, MessageTag, RawMessage};
use lettre::message::Mailbox;
use serde_json::{Value, json};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::OnceCell;
use wakeful_config::email_providers::Ses as Config;
use wakeful_engine::channel::{Channel, Outbound, SendError};

/// The limit of one call. Shorter than the deliver job's limit, so the call itself reports how it ended.
const CALL: Duration = Duration::from_secs(45);

const CONNECT: Duration = Duration::from_secs(10);

/// Sends through SES, with the credentials that the AWS SDK finds: environment variables, a role's token, the
/// container's or the machine's.
pub struct Ses {
    from: Mailbox,
    config: Config,
    client: OnceCell<Client>,
}

impl Ses {
    /// `from` is the sender of mail that names none. No request goes to AWS before the first mail.
    ///
    /// # Errors
    /// When `from` is not an address.
    pub fn new(config: &Config, from: &str) -> Result<Ses, String> {
        let from = from.parse().map_err(|error| format!("{from:?} is not an email address: {error}"))?;
        Ok(Ses { from, config: config.clone(), client: OnceCell::new() })
    }

    async fn client(&self) -> &Client {
        let made = self.client.get_or_init(|| async {
            let timeouts = TimeoutConfig::builder().connect_timeout(CONNECT).operation_timeout(CALL).build();
            let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12())
                // The deliver job decides about retries, because only it knows what may have gone out.
                .retry_config(RetryConfig::disabled())
                .timeout_config(timeouts);
            if let Some(region) = &self.config.region {
                loader = loader.region(Region::new(region.clone()));
            }
            if let Some(url) = &self.config.endpoint_url {
                loader = loader.endpoint_url(url);
            }
            Client::new(&loader.load().await)
        });
        made.await
    }
}

#[async_trait]
impl Channel for Ses {
    fn name(&self) -> &str {
        "email"
    }

    fn is_idempotent(&self) -> bool {
        false
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let composed = compose(Some(&self.from), message)?;
        let refused =
            |error: &dyn Error| SendError::Refused(format!("the message cannot be composed: {error}"));
        let envelope = &composed.envelope;
        let to = envelope.to().iter().map(ToString::to_string).collect();
        let raw = RawMessage::builder().data(Blob::new(composed.bytes.clone()));
        let raw = raw.build().map_err(|error| refused(&error))?;
        // Events of a configuration set contain this tag, and a bounce finds its delivery by it.
        let tag = MessageTag::builder().name("delivery_id").value(message.delivery_id);
        let tag = tag.build().map_err(|error| refused(&error))?;
        let begun = Begun::default();
        let sent = self
            .client()
            .await
            .send_email()
            .set_from_email_address(envelope.from().map(ToString::to_string))
            // The recipients are those that the policy allowed, whatever the headers say.
            .destination(Destination::builder().set_to_addresses(Some(to)).build())
            .content(EmailContent::builder().raw(raw).build())
            .set_configuration_set_name(self.config.configuration_set.clone())
            .email_tags(tag)
            .customize()
            .interceptor(begun.clone())
            .send()
            .await;
        match sent {
            Ok(sent) => Ok(json!({ "ses": { "message_id": sent.message_id() } })),
            Err(error) => Err(judge(&error, begun.0.load(Ordering::SeqCst))),
        }
    }
}

/// Whether sending the request began. An error before that means that nothing was sent.
#[derive(Clone, Debug, Default)]
struct Begun(Arc<AtomicBool>);

impl Intercept for Begun {
    fn name(&self) -> &'static str {
        "Begun"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        self.0.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn judge<R>(error: &SdkError<SendEmailError, R>, begun: bool) -> SendError
where
    R: std::fmt::Debug + 'static,
{
    let said = || format!("SES: {}", DisplayErrorContext(error));
    match error {
        SdkError::ServiceError(answer) => by_answer(answer.err()),
        // Missing credentials or region, which an operator can fix.
        SdkError::ConstructionFailure(_) => SendError::Later(said()),
        SdkError::TimeoutError(_) | SdkError::DispatchFailure(_) if !begun || was_never_connected(error) => {
            SendError::Later(said())
        }
        // SdkError is non-exhaustive; for an unknown kind the mail may have gone out.
        _ => SendError::Unknown(said()),
    }
}

/// Maps an error that SES answered with.
fn by_answer(error: &SendEmailError) -> SendError {
    let code = error.code().unwrap_or("an error without a code");
    let said = format!("SES: {code}: {}", error.message().unwrap_or("nothing more was said"));
    match code {
        "MessageRejected"
        | "BadRequestException"
        | "MailFromDomainNotVerifiedException"
        | "NotFoundException"
        | "ValidationException" => SendError::Refused(said),
        // SES failed inside, perhaps after it accepted the mail.
        "InternalFailure"
        | "InternalServerError"
        | "InternalServiceErrorException"
        | "ServiceUnavailable"
        | "an error without a code" => SendError::Unknown(said),
        // Throttled, paused, over quota, or wrong credentials: not sent, and it may work later.
        _ => SendError::Later(said),
    }
}

/// Returns whether no connection was ever made.
fn was_never_connected(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<std::io::Error>();
        if io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
#[path = "ses_tests.rs"]
mod tests;
