//! One LMTP connection with a mail server.

use super::wire::{self, Data, Line};
use crate::email::incoming::{self, Accepted, Arrived};
use crate::email::mailbox::mailboxes_of;
use crate::email::not_accepted::NotAccepted;
use crate::email::parse::Unreadable;
use smtp_proto::{Error as Syntax, Request};
use std::borrow::Cow;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tracing::warn;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::Refused;
use wakeful_store::Error;
use wakeful_workflow::mail::scan::Hostile;
use wakeful_workflow::mail::scan::MAIL_BYTES;

/// The longest silence before the greeting. Later a server may keep the connection for its next mail.
const GREETING_TIME: Duration = Duration::from_secs(30);
/// The longest silence between two commands, and the longest time for a mail (RFC 5321, 4.5.3.2).
const COMMAND_TIME: Duration = Duration::from_secs(300);
const DATA_TIME: Duration = Duration::from_secs(600);
/// How long a mail in transfer may still take once the process drains.
const DRAIN_TIME: Duration = Duration::from_secs(10);
const WRITE_TIME: Duration = Duration::from_secs(60);

const COMMAND_BYTES: usize = 4096;
const RECIPIENTS: usize = 100;
/// After this many wrong commands the connection is closed.
const ERRORS: usize = 20;

/// Serves one server until it quits, the connection breaks, or the process drains.
///
/// # Errors
/// The error that ended the connection.
pub(super) async fn serve(ctx: &Ctx, stream: TcpStream) -> anyhow::Result<()> {
    let (reader, writer) = stream.into_split();
    let connection = Connection { ctx, reader: BufReader::new(reader), writer, out: String::new() };
    connection.serve().await
}

struct Connection<'c> {
    ctx: &'c Ctx,
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// Replies that are written once all received commands are read (PIPELINING).
    out: String,
}

/// The sender and the recipients so far.
#[derive(Default)]
struct Envelope {
    from: Option<String>,
    to: Vec<String>,
}

enum Next {
    GoOn,
    Close,
}

impl Connection<'_> {
    async fn serve(mut self) -> anyhow::Result<()> {
        self.say("220 Wakeful LMTP");
        let (mut envelope, mut greeted, mut errors) = (Envelope::default(), false, 0);
        loop {
            if self.reader.buffer().is_empty() {
                self.flush().await?;
            }
            let patience = if greeted { COMMAND_TIME } else { GREETING_TIME };
            let line = tokio::select! {
                biased;
                line = wire::line(&mut self.reader, COMMAND_BYTES) => Some(line?),
                // Stop only between two commands, where no mail is in transfer.
                () = self.ctx.shutdown.draining.cancelled() => None,
                () = tokio::time::sleep(patience) => None,
            };
            let Some(line) = line else {
                self.say("421 4.3.2 Closing: try again later");
                return self.flush().await;
            };
            let mut text = match line {
                Line::Whole(text) => text,
                Line::End => return Ok(()),
                Line::TooLong => {
                    self.say("500 5.5.6 The line is too long");
                    return self.flush().await;
                }
                Line::BareLf => {
                    self.say("500 5.5.2 A line ends with CR and LF");
                    return self.flush().await;
                }
            };
            text.extend_from_slice(b"\r\n");
            let before = self.out.len();
            match self.command(&text, &mut envelope, &mut greeted).await? {
                Next::GoOn => {}
                Next::Close => return self.flush().await,
            }
            errors += usize::from(self.out[before.min(self.out.len())..].starts_with('5'));
            if errors > ERRORS {
                self.say("421 4.7.0 Too many errors");
                return self.flush().await;
            }
        }
    }

    async fn command(
        &mut self,
        text: &[u8],
        envelope: &mut Envelope,
        greeted: &mut bool,
    ) -> anyhow::Result<Next> {
        let request = match Request::parse(&mut text.iter()) {
            Ok(request) => request,
            Err(error) => {
                self.say(match error {
                    Syntax::UnknownCommand
                    | Syntax::InvalidResponse { .. }
                    | Syntax::NeedsMoreData { .. } => "500 5.5.1 This command is not known",
                    Syntax::InvalidSenderAddress => "501 5.1.7 The sender is not an address",
                    Syntax::InvalidRecipientAddress => "501 5.1.3 The recipient is not an address",
                    Syntax::UnsupportedParameter { .. } => "555 5.5.4 This parameter is not known",
                    _ => "501 5.5.4 The command's arguments are wrong",
                });
                return Ok(Next::GoOn);
            }
        };
        match request {
            Request::Lhlo { .. } => {
                (*greeted, *envelope) = (true, Envelope::default());
                self.say("250-Wakeful");
                self.say("250-PIPELINING");
                self.say("250-8BITMIME");
                self.say("250-SMTPUTF8");
                self.say("250-ENHANCEDSTATUSCODES");
                self.say(&format!("250 SIZE {MAIL_BYTES}"));
            }
            Request::Ehlo { .. } | Request::Helo { .. } => self.say("500 5.5.1 This is LMTP: say LHLO"),
            Request::Noop { .. } => self.say("250 2.0.0 OK"),
            Request::Rset => {
                *envelope = Envelope::default();
                self.say("250 2.0.0 OK");
            }
            Request::Quit => {
                self.say("221 2.0.0 Goodbye");
                return Ok(Next::Close);
            }
            Request::Vrfy { .. } => self.say("252 2.5.0 Cannot verify: send a mail to find out"),
            Request::Mail { .. } | Request::Rcpt { .. } | Request::Data if !*greeted => {
                self.say("503 5.5.1 Say LHLO first");
            }
            Request::Mail { from } => self.mail(envelope, &from.address, from.size),
            Request::Rcpt { to } => self.rcpt(envelope, to.address),
            Request::Data => return self.data(std::mem::take(envelope)).await,
            Request::Bdat { .. }
            | Request::Auth { .. }
            | Request::Expn { .. }
            | Request::Help { .. }
            | Request::Etrn { .. }
            | Request::Atrn { .. }
            | Request::Burl { .. }
            | Request::StartTls => self.say("502 5.5.1 This command is not offered"),
        }
        Ok(Next::GoOn)
    }

    fn mail(&mut self, envelope: &mut Envelope, from: &str, size: usize) {
        if envelope.from.is_some() {
            self.say("503 5.5.1 A mail has been begun: send it, or say RSET");
        } else if size > MAIL_BYTES {
            self.say("552 5.3.4 The mail is too large");
        } else {
            envelope.from = Some(from.to_owned());
            self.say("250 2.1.0 OK");
        }
    }

    fn rcpt(&mut self, envelope: &mut Envelope, to: Cow<'_, str>) {
        if envelope.from.is_none() {
            self.say("503 5.5.1 Say MAIL first");
        } else if envelope.to.len() >= RECIPIENTS {
            self.say("452 4.5.3 Too many recipients: use another mail for the others");
        } else if mailboxes_of(&self.ctx.config.email, &[&to]).is_empty() {
            self.say("550 5.1.1 There is no such mailbox here");
        } else {
            envelope.to.push(to.into_owned());
            self.say("250 2.1.5 OK");
        }
    }

    async fn data(&mut self, envelope: Envelope) -> anyhow::Result<Next> {
        let (Some(from), false) = (envelope.from, envelope.to.is_empty()) else {
            self.say("503 5.5.1 There is no recipient");
            return Ok(Next::GoOn);
        };
        self.say("354 Send the mail, and a dot on a line of its own");
        self.flush().await?;
        let limit = async {
            tokio::select! {
                () = tokio::time::sleep(DATA_TIME) => {}
                () = async { self.ctx.shutdown.draining.cancelled().await; tokio::time::sleep(DRAIN_TIME).await } => {}
            }
        };
        let data = tokio::select! {
            data = wire::data(&mut self.reader) => data?,
            () = limit => {
                self.say("421 4.4.2 The mail took too long: nothing was taken");
                return Ok(Next::Close);
            }
        };
        let raw = match data {
            Data::Mail(raw) => raw,
            Data::Cut => anyhow::bail!("the connection ended within a mail"),
            Data::TooLarge => {
                self.say_each(&envelope.to, "552 5.3.4 The mail is too large");
                return Ok(Next::GoOn);
            }
            Data::Smuggled => {
                self.say_each(&envelope.to, "554 5.6.0 A line of the mail does not end with CR and LF");
                return Ok(Next::Close);
            }
        };
        let recipients = envelope.to.clone();
        let arrived = Arrived { raw, mail_from: Some(from), recipients, dmarc: None, unwanted: None };
        let incoming = match incoming::read(arrived).await {
            Ok(incoming) => incoming,
            Err(not_accepted) => {
                self.say_each(&envelope.to, &refusal(&not_accepted));
                return Ok(Next::GoOn);
            }
        };
        // One mail per mailbox, even if the recipients name it twice. If one of them is a signed
        // plus-address, its token is used.
        let email = &self.ctx.config.email;
        let recipients: Vec<&str> = envelope.to.iter().map(String::as_str).collect();
        let mut replies = Vec::new();
        for addressed in mailboxes_of(email, &recipients) {
            let reply = match incoming::accept_for(self.ctx, &incoming, &addressed).await {
                Ok(Accepted::Woke(woken)) => format!("250 2.0.0 Taken as {}", woken.session_id),
                Ok(Accepted::Dropped { .. }) => "250 2.0.0 Accepted, but not shown to the agents".to_owned(),
                Err(not_accepted) => refusal(&not_accepted),
            };
            replies.push((addressed.mailbox_id, reply));
        }
        for to in recipients {
            let mailboxes = mailboxes_of(email, &[to]);
            let reply = mailboxes
                .first()
                .and_then(|mailbox| replies.iter().find(|(id, _)| *id == mailbox.mailbox_id))
                .map_or("550 5.1.1 There is no such mailbox here", |(_, reply)| reply);
            self.say(reply);
        }
        Ok(Next::GoOn)
    }

    fn say_each(&mut self, to: &[String], reply: &str) {
        for _ in to {
            self.say(reply);
        }
    }

    fn say(&mut self, reply: &str) {
        self.out.push_str(reply);
        self.out.push_str("\r\n");
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        let out = std::mem::take(&mut self.out);
        tokio::time::timeout(WRITE_TIME, self.writer.write_all(out.as_bytes())).await??;
        Ok(())
    }
}

/// The reply for a mail that was not accepted: 5xx if a retry cannot help, and otherwise 4xx, so that its
/// server keeps it.
fn refusal(not_accepted: &NotAccepted) -> String {
    let (code, text) = match not_accepted {
        NotAccepted::Unreadable(Unreadable::Hostile(Hostile::TooLarge)) => {
            ("552 5.3.4", not_accepted.to_string())
        }
        NotAccepted::Unreadable(
            Unreadable::Hostile(Hostile::Headers | Hostile::Parts | Hostile::Depth | Hostile::Ambiguous)
            | Unreadable::NoMail,
        )
        | NotAccepted::NoMailbox
        | NotAccepted::Refused(Refused::Store(Error::KeyReused { .. } | Error::Bundle(_))) => {
            ("554 5.6.0", not_accepted.to_string())
        }
        // The reply tells the server that it sends too much at once. Nothing here is broken, so log no
        // warning.
        NotAccepted::ReadersBusy
        | NotAccepted::Refused(Refused::Full | Refused::Store(Error::InboxFull { .. })) => {
            ("451 4.3.2", not_accepted.to_string())
        }
        NotAccepted::Unreadable(Unreadable::NoThread) | NotAccepted::Defect | NotAccepted::Refused(_) => {
            warn!(error = %not_accepted, "A mail was not taken, and is left with its server");
            ("451 4.3.0", "Not now: try again later".to_owned())
        }
    };
    let text: String = text.chars().map(|c| if c.is_ascii_graphic() { c } else { ' ' }).take(200).collect();
    format!("{code} {text}")
}
