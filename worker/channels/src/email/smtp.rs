//! Sends mail through one SMTP server, which delivers it further.
//!
//! SMTP has no idempotency keys: a mail handed over twice is two mails. So it matters how far an attempt got.
//! Before we write the final line with the single dot, nothing is sent. After it, only the server's reply
//! tells the result; without a reply the delivery is uncertain.

use super::compose::compose;
use super::dkim::Signer;
use async_trait::async_trait;
use lettre::address::Envelope;
use lettre::message::Mailbox;
use lettre::transport::smtp::Error;
use lettre::transport::smtp::authentication::{Credentials, Mechanism};
use lettre::transport::smtp::client::{AsyncSmtpConnection, Certificate, TlsParameters};
use lettre::transport::smtp::commands::{Data, Mail, Rcpt};
use lettre::transport::smtp::extension::{ClientId, Extension, MailParameter};
use lettre::transport::smtp::response::Severity;
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use std::error::Error as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};
use wakeful_config::mail_out::{self, Security};
use wakeful_engine::channel::SEND;
use wakeful_engine::channel::{Channel, Outbound, SendError};

/// An attempt ends this much before the deliver job's own limit. If the job had to stop the attempt, it would
/// have to call the delivery uncertain.
const SPARE: Duration = Duration::from_secs(2);

/// How long a mail waits after it found no free connection.
const BUSY: Duration = Duration::from_secs(5);

/// How long we wait for the server's answer to QUIT.
const QUIT: Duration = Duration::from_secs(1);

/// Maximum number of characters that are kept of the reply for a refused recipient.
const REPLY_CHARS: usize = 200;

/// Hands mail to an SMTP server. Each mail has its own connection; the number of connections is limited.
pub struct Smtp {
    host: String,
    port: u16,
    security: Security,
    tls: Option<TlsParameters>,
    credentials: Option<Credentials>,
    hello: ClientId,
    provider: Option<Provider>,
    /// The limit for each phase before the message itself.
    handshake_timeout: Duration,
    slots: Semaphore,
    from: Mailbox,
    signer: Option<Signer>,
}

impl Smtp {
    /// Uses the configured server. `from` is the sender of mail that names none; `hello` is this host's name,
    /// for EHLO.
    ///
    /// # Errors
    /// A sentence: the certificate cannot be read, or TLS cannot be set up.
    pub fn new(
        config: &mail_out::Smtp,
        from: Mailbox,
        hello: &str,
        signer: Option<Signer>,
    ) -> Result<Smtp, String> {
        let tls = match config.security {
            Security::None => None,
            Security::Starttls | Security::Tls => Some(tls(config)?),
        };
        let credentials = config
            .user
            .clone()
            .zip(config.password.as_ref())
            .map(|(user, password)| Credentials::new(user, password.expose_secret().to_owned()));
        Ok(Smtp {
            host: config.host.clone(),
            port: config.port,
            security: config.security,
            tls,
            credentials,
            hello: ClientId::Domain(hello.to_owned()),
            provider: Provider::of(&config.host),
            handshake_timeout: Duration::from_secs(config.timeout_s),
            slots: Semaphore::new(config.max_connections),
            from,
            signer,
        })
    }

    /// Connects, starts TLS and logs in, without sending anything. `wakeful doctor` uses it.
    ///
    /// # Errors
    /// A sentence, with the server's own words if there are any.
    pub async fn greet(&self) -> Result<(), String> {
        match timeout(self.handshake_timeout, self.connect()).await {
            Ok(Ok(mut connection)) => {
                let _ = timeout(QUIT, connection.quit()).await;
                Ok(())
            }
            Ok(Err(error)) => Err(self.at(&error)),
            Err(_) => Err(self.at(&silence(self.handshake_timeout))),
        }
    }

    async fn connect(&self) -> Result<AsyncSmtpConnection, String> {
        let wrapped = match self.security {
            Security::Tls => self.tls.clone(),
            Security::Starttls | Security::None => None,
        };
        let address = (self.host.as_str(), self.port);
        let mut connection = AsyncSmtpConnection::connect_tokio1(
            address,
            Some(self.handshake_timeout),
            &self.hello,
            wrapped,
            None,
        )
        .await
        .map_err(|error| error_text(&error))?;
        if let (Security::Starttls, Some(tls)) = (self.security, &self.tls) {
            // Never continue without TLS: an attacker on the way could have removed the offer.
            if !connection.can_starttls() {
                return Err("it does not offer STARTTLS, and security = \"starttls\" asks for it".to_owned());
            }
            connection.starttls(tls.clone(), &self.hello).await.map_err(|error| error_text(&error))?;
        }
        if let Some(credentials) = &self.credentials {
            let mechanisms = [Mechanism::Plain, Mechanism::Login];
            let proven = connection.auth(&mechanisms, credentials).await;
            proven.map_err(|error| {
                format!("it rejects the user and password of [email.smtp]: {}", error_text(&error))
            })?;
        }
        Ok(connection)
    }

    /// Sends MAIL and RCPT. Returns the recipients that the server refuses while it accepts others.
    async fn address(
        &self,
        connection: &mut AsyncSmtpConnection,
        envelope: &Envelope,
    ) -> Result<Vec<Refused>, SendError> {
        let mut options = Vec::new();
        let ascii = |address: &lettre::Address| AsRef::<str>::as_ref(address).is_ascii();
        if !envelope.from().is_none_or(ascii) || !envelope.to().iter().all(ascii) {
            if !connection.server_info().supports_feature(Extension::SmtpUtfEight) {
                let text = "an address has letters beyond ASCII, and the mail server does not support them (SMTPUTF8)";
                return Err(SendError::Refused(text.to_owned()));
            }
            options.push(MailParameter::SmtpUtfEight);
        }
        let begun = connection.command(Mail::new(envelope.from().cloned(), options)).await;
        begun.map_err(|error| self.not_sent_error(&error))?;
        let mut refused = Vec::new();
        for recipient in envelope.to() {
            match connection.command(Rcpt::new(recipient.clone(), Vec::new())).await {
                Ok(_) => {}
                Err(error) if error.is_permanent() => refused.push(Refused {
                    address: recipient.to_string(),
                    reply: error_text(&error).chars().take(REPLY_CHARS).collect(),
                }),
                // If one recipient is refused temporarily, the whole mail waits: after sending it to the
                // others, a retry would send it to them twice.
                Err(error) => return Err(self.not_sent_error(&error)),
            }
        }
        if refused.len() == envelope.to().len() {
            let all: Vec<String> =
                refused.iter().map(|one| format!("{}: {}", one.address, one.reply)).collect();
            return Err(SendError::Refused(format!("every recipient was refused: {}", all.join("; "))));
        }
        let go = connection.command(Data).await.map_err(|error| self.not_sent_error(&error))?;
        if !go.has_code(354) {
            return Err(SendError::Later(self.at(&format!("it answered DATA with {}", go.code()))));
        }
        Ok(refused)
    }

    /// Writes the message and reads the server's reply.
    async fn hand_over(
        &self,
        connection: &mut AsyncSmtpConnection,
        bytes: &[u8],
        until: Instant,
    ) -> Result<String, SendError> {
        let written = AtomicBool::new(false);
        // After the last piece lettre writes the final dot. So when it asks for the end, the dot may already
        // be out.
        let pieces = std::iter::once(bytes).chain(std::iter::from_fn(|| {
            written.store(true, Ordering::SeqCst);
            None
        }));
        let said = timeout_at(until, connection.message_iter(pieces)).await;
        let lost = |error: String| {
            if written.load(Ordering::SeqCst) {
                SendError::Unknown(
                    self.at(&format!("the message was handed over, and no answer came: {error}")),
                )
            } else {
                SendError::Later(self.at(&error))
            }
        };
        match said {
            Ok(Ok(reply)) if reply.code().severity == Severity::PositiveCompletion => {
                let text: Vec<&str> = reply.message().collect();
                Ok(format!("{} {}", reply.code(), text.join(" ")).chars().take(REPLY_CHARS).collect())
            }
            Ok(Ok(reply)) => Err(lost(format!("it answered {}", reply.code()))),
            Ok(Err(error)) if error.is_permanent() || error.is_transient() => {
                Err(self.not_sent_error(&error))
            }
            Ok(Err(error)) => Err(lost(error_text(&error))),
            Err(_) => Err(lost("the time limit passed".to_owned())),
        }
    }

    /// The error for a failure before the hand-over, or for a refusal: nothing was sent.
    fn not_sent_error(&self, error: &Error) -> SendError {
        let text = self.at(&error_text(error));
        if error.is_permanent() { SendError::Refused(text) } else { SendError::Later(text) }
    }

    fn at(&self, text: &str) -> String {
        format!("mail server {}:{}: {text}", self.host, self.port)
    }
}

/// A mail provider whose SMTP server reads its own headers. It reports a bounce by webhook, and these headers
/// identify the delivery there: not every provider keeps or reports the Message-ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Provider {
    Postmark,
    Mailgun,
    Ses,
}

impl Provider {
    fn of(host: &str) -> Option<Provider> {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        if host.ends_with(".postmarkapp.com") {
            Some(Provider::Postmark)
        } else if host.ends_with(".mailgun.org") {
            Some(Provider::Mailgun)
        } else if host.starts_with("email-smtp") && host.ends_with(".amazonaws.com") {
            Some(Provider::Ses)
        } else {
            None
        }
    }

    /// The header lines for the provider, which it removes from the mail.
    fn headers(self, delivery_id: &str) -> String {
        match self {
            // Without X-PM-KeepID Postmark replaces the Message-ID, and replies would name an unknown id.
            Provider::Postmark => {
                format!("X-PM-Metadata-delivery_id: {delivery_id}\r\nX-PM-KeepID: true\r\n")
            }
            Provider::Mailgun => {
                format!("X-Mailgun-Variables: {}\r\n", json!({"delivery_id": delivery_id}))
            }
            Provider::Ses => format!("X-SES-MESSAGE-TAGS: delivery_id={delivery_id}\r\n"),
        }
    }
}

/// A recipient that the server refused.
struct Refused {
    address: String,
    reply: String,
}

#[async_trait]
impl Channel for Smtp {
    fn name(&self) -> &str {
        "email"
    }

    fn is_idempotent(&self) -> bool {
        false
    }

    /// The receipt is `{"smtp": "250 …", "message_id", "refused"?: [{"address", "reply"}]}`.
    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let mut mail = compose(Some(&self.from), message)?;
        if let Some(provider) = self.provider {
            let mut bytes = provider.headers(message.delivery_id).into_bytes();
            bytes.append(&mut mail.bytes);
            mail.bytes = bytes;
        }
        if let Some(signer) = self.signer.as_ref().filter(|signer| signer.is_for(&mail.from_domain)) {
            mail.bytes = signer.sign(mail.bytes).map_err(SendError::Refused)?;
        }
        let until = Instant::now() + SEND.saturating_sub(SPARE);
        // When all our connections are busy, the mail is not at fault, so waiting costs no attempt.
        let slot = timeout(self.handshake_timeout, self.slots.acquire()).await;
        let Ok(Ok(_slot)) = slot else {
            let error = "all connections to the mail server are in use".to_owned();
            return Err(SendError::Throttled { error, after: BUSY });
        };
        let before = async {
            let mut connection = self.connect().await.map_err(|error| SendError::Later(self.at(&error)))?;
            let refused = match self.address(&mut connection, &mail.envelope).await {
                Ok(refused) => refused,
                Err(error) => {
                    let _ = timeout(QUIT, connection.quit()).await;
                    return Err(error);
                }
            };
            Ok((connection, refused))
        };
        let (mut connection, refused) = timeout(self.handshake_timeout, before)
            .await
            .unwrap_or_else(|_| Err(SendError::Later(self.at(&silence(self.handshake_timeout)))))?;
        let said = self.hand_over(&mut connection, &mail.bytes, until).await?;
        let _ = timeout(QUIT, connection.quit()).await;
        let mut receipt =
            json!({"smtp": said, "message_id": format!("<{}@{}>", message.delivery_id, mail.from_domain)});
        if !refused.is_empty() {
            let refused = refused.iter().map(|one| json!({"address": one.address, "reply": one.reply}));
            receipt["refused"] = refused.collect();
        }
        Ok(receipt)
    }
}

/// TLS with the process's own crypto. Trusts the host's certificates and the configured one.
fn tls(config: &mail_out::Smtp) -> Result<TlsParameters, String> {
    let mut builder = TlsParameters::builder(config.host.clone());
    if let Some(file) = &config.ca_file {
        let shown = file.display();
        let pem = std::fs::read(file)
            .map_err(|error| format!("email.smtp.ca_file: cannot read {shown}: {error}"))?;
        let certificate = Certificate::from_pem(&pem)
            .map_err(|error| format!("email.smtp.ca_file: {shown} has no PEM certificate: {error}"))?;
        builder = builder.add_root_certificate(certificate);
    }
    builder.build().map_err(|error| format!("email.smtp: TLS cannot be set up: {}", error_text(&error)))
}

fn silence(waited: Duration) -> String {
    format!("no answer within {} seconds", waited.as_secs())
}

/// The server's reply, as in `550 5.1.1 No such user`, or else the error.
fn error_text(error: &Error) -> String {
    let source = error.source().map(ToString::to_string);
    match (error.status(), source) {
        (Some(code), Some(text)) => format!("{code} {text}"),
        (Some(code), None) => code.to_string(),
        (None, _) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpSocket};

    /// A server that accepts everything up to DATA. It reads `after` bytes of the message, or all of it,
    /// hangs up, and returns what it read.
    async fn hangs_up(listener: TcpListener, after: Option<usize>) -> String {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::with_capacity(64, read);
        write.write_all(b"220 test\r\n").await.unwrap();
        loop {
            let mut line = String::new();
            read.read_line(&mut line).await.unwrap();
            if line.starts_with("DATA") {
                break;
            }
            write.write_all(b"250 OK\r\n").await.unwrap();
        }
        write.write_all(b"354 go on\r\n").await.unwrap();
        let mut taken = String::new();
        match after {
            Some(bytes) => drop(read.read_exact(&mut vec![0; bytes]).await.unwrap()),
            None => {
                while !taken.ends_with("\r\n.\r\n") {
                    read.read_line(&mut taken).await.unwrap();
                }
            }
        }
        taken
    }

    /// Sends a mail of `lines` lines through a server that [`hangs_up`], as one of `provider`. Returns the
    /// result and what the server read.
    async fn sent(
        lines: usize,
        after: Option<usize>,
        provider: Option<Provider>,
    ) -> (Result<Value, SendError>, String) {
        // Use a small receive buffer, so that data that the server does not read blocks the client's writes.
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let config = mail_out::Smtp {
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().unwrap().port(),
            security: Security::None,
            user: None,
            password: None,
            ca_file: None,
            timeout_s: 20,
            max_connections: 1,
        };
        let smtp = Smtp::new(&config, "desk@example.org".parse().unwrap(), "test", None).unwrap();
        let smtp = Smtp { provider, ..smtp };
        let body = "A line of a mail that is far larger than what fits between the two.\n".repeat(lines);
        let content = json!({"to": ["ann@example.com"], "subject": "s", "body": body});
        let server = tokio::spawn(hangs_up(listener, after));
        let sent = smtp.send(&Outbound::new("dlv_1", &content)).await;
        (sent, server.await.unwrap())
    }

    #[tokio::test]
    async fn a_message_that_was_cut_off_was_not_sent_and_one_without_an_answer_may_have_been() {
        // The first mail must block before its dot, so it is larger than both buffers. The second is read to
        // its end.
        let (cut, _) = sent(120_000, Some(1000), None).await;
        assert!(matches!(cut, Err(SendError::Later(_))), "{cut:?}");
        let (silent, _) = sent(100, None, None).await;
        assert!(matches!(silent, Err(SendError::Unknown(_))), "{silent:?}");
    }

    #[tokio::test]
    async fn a_provider_is_told_the_delivery_in_its_own_words() {
        for (provider, lines) in [
            (Provider::Postmark, "X-PM-Metadata-delivery_id: dlv_1\r\nX-PM-KeepID: true\r\n"),
            (Provider::Mailgun, "X-Mailgun-Variables: {\"delivery_id\":\"dlv_1\"}\r\n"),
            (Provider::Ses, "X-SES-MESSAGE-TAGS: delivery_id=dlv_1\r\n"),
        ] {
            let (_, mail) = sent(1, None, Some(provider)).await;
            let (head, body) = mail.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with(lines), "{provider:?}: {mail}");
            assert!(head.contains("\r\nMessage-ID: <dlv_1@example.org>\r\n"), "{mail}");
            assert!(body.starts_with("A line"), "{mail}");
        }
        for (host, provider) in [
            ("smtp.postmarkapp.com", Some(Provider::Postmark)),
            ("SMTP-Broadcasts.PostmarkApp.com.", Some(Provider::Postmark)),
            ("smtp.eu.mailgun.org", Some(Provider::Mailgun)),
            ("email-smtp.eu-central-1.amazonaws.com", Some(Provider::Ses)),
            ("postmarkapp.com.example.org", None),
            ("notpostmarkapp.com", None),
            ("mail.example.org", None),
        ] {
            assert_eq!(Provider::of(host), provider, "{host}");
        }
    }
}
