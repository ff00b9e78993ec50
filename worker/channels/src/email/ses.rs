//! Outgoing mail by Amazon SES. Only in builds with the feature `ses`.
//!
//! SES takes the same mail twice, and sends it twice: what nobody saw end is shown as uncertain and not sent again.

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

/// One call: less than the deliver job gives it, so that the end of a call is seen as what it is.
const CALL: Duration = Duration::from_secs(45);

const CONNECT: Duration = Duration::from_secs(10);

/// Sends by SES, with the credentials that AWS' SDK finds: variables, a role's token, the container's or the machine's.
pub struct Ses {
    from: Mailbox,
    config: Config,
    client: OnceCell<Client>,
}

impl Ses {
    /// `from` is the sender of mail that names none. Nothing is asked of AWS before the first mail.
    ///
    /// # Errors
    /// When `from` is no address.
    pub fn new(config: &Config, from: &str) -> Result<Ses, String> {
        let from = from.parse().map_err(|error| format!("{from:?} is no email address: {error}"))?;
        Ok(Ses { from, config: config.clone(), client: OnceCell::new() })
    }

    async fn client(&self) -> &Client {
        let made = self.client.get_or_init(|| async {
            let timeouts = TimeoutConfig::builder().connect_timeout(CONNECT).operation_timeout(CALL).build();
            let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12())
                // The deliver job decides what is tried again: only it knows what may have gone out.
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
        // Events of a configuration set name the tag: by it a bounce finds its delivery.
        let tag = MessageTag::builder().name("delivery_id").value(message.delivery_id);
        let tag = tag.build().map_err(|error| refused(&error))?;
        let begun = Begun::default();
        let sent = self
            .client()
            .await
            .send_email()
            .set_from_email_address(envelope.from().map(ToString::to_string))
            // Whom it goes to is what the policy let pass, whatever a header says.
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

/// Whether the request began to be sent: before that, no error leaves a doubt.
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
        // No credentials, no region: what an operator can put right.
        SdkError::ConstructionFailure(_) => SendError::Later(said()),
        SdkError::TimeoutError(_) | SdkError::DispatchFailure(_) if !begun || was_never_connected(error) => {
            SendError::Later(said())
        }
        // SdkError may get more kinds, and what is not known may have gone out.
        _ => SendError::Unknown(said()),
    }
}

/// SES answered.
fn by_answer(error: &SendEmailError) -> SendError {
    let code = error.code().unwrap_or("an error without a code");
    let said = format!("SES: {code}: {}", error.message().unwrap_or("nothing more was said"));
    match code {
        "MessageRejected"
        | "BadRequestException"
        | "MailFromDomainNotVerifiedException"
        | "NotFoundException"
        | "ValidationException" => SendError::Refused(said),
        // It broke down inside, before or after it took the mail.
        "InternalFailure"
        | "InternalServerError"
        | "InternalServiceErrorException"
        | "ServiceUnavailable"
        | "an error without a code" => SendError::Unknown(said),
        // Throttled, paused, a quota, or credentials that do not fit: it was not taken, and an operator may change that.
        _ => SendError::Later(said),
    }
}

/// Whether there was nobody to send it to.
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
