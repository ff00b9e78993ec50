//! Incoming mail, from any entry point: parsed, judged, and given to a session.

use super::bounce::{self, Bounce};
use super::mailbox::{Addressed, mailboxes_of};
use super::not_accepted::NotAccepted;
use super::parse::{self, Read, Unreadable};
use bytes::Bytes;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tracing::{info, warn};
use wakeful_config::mailboxes::{Incoming as Settings, Unproved};
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest;
use wakeful_engine::ingest::Refused;
use wakeful_engine::new_session::{self, Trigger};
use wakeful_store::Error;
use wakeful_store::mail::{KnownMail, MailWakes, NewMail};
use wakeful_store::space::{self, Scope};
use wakeful_store::wake::{Continues, NewMessage, NewSession, Woken};
use wakeful_workflow::access::Speaker;
use wakeful_workflow::mail::auth::Dmarc;
use wakeful_workflow::mail::policy::{self, MailboxRules};
use wakeful_workflow::mail::scan::{Hostile, MAIL_BYTES};
use wakeful_workflow::mail::{MailFacts, auth, subject_key, text, thread};
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;

/// How many mails are parsed at a time. Each may need several times its size in memory.
static READING: Semaphore = Semaphore::const_new(2);
/// How long a mail waits to be parsed. The time is short, because a waiting mail takes memory here, and its
/// sender can keep it and retry.
const READING_WAIT: Duration = Duration::from_secs(10);

/// How many earlier mails of a thread, and how many of their bytes, a new session in the thread gets.
const THREAD_MAILS: i64 = 20;
const THREAD_BYTES: usize = 64 << 10;
const THREAD_MAIL_BYTES: usize = 16 << 10;

/// A longer Message-ID is replaced by its hash.
const KEY_BYTES: usize = 200;

/// A mail as it arrived, before parsing.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The whole message, RFC 5322.
    pub raw: Bytes,
    /// The envelope's sender. `None` if the entry point does not know it; empty for the null return path.
    pub mail_from: Option<String>,
    /// The envelope's recipients. If empty, the recipients in the header count.
    pub recipients: Vec<String>,
    /// What DMARC says, as reported by a party that handed the mail over and proved its identity. `None` if
    /// the mail's headers say it.
    pub dmarc: Option<Dmarc>,
    /// Why that party would withhold the mail from everybody: a virus, or spam. `None` if it gives no reason.
    pub unwanted: Option<String>,
}

/// The outcome for one mailbox.
#[derive(Clone, Debug)]
pub enum Accepted {
    /// It woke a session, now or earlier (`duplicate`).
    Woke(Woken),
    /// It is withheld from the agents for good, and its server need not retry: automatic mail, a loop, or a
    /// sender whose mailbox takes no replies.
    Dropped { reason: String },
}

/// A mail that was parsed and not yet accepted.
#[derive(Clone)]
pub(super) struct Incoming {
    read: Arc<Read>,
    /// The bounces of our own mail that it reports.
    bounces: Arc<[Bounce]>,
    dmarc: Option<Dmarc>,
    unwanted: Option<String>,
}

/// Accepts a mail: one session for each of our mailboxes that it is addressed to.
///
/// # Errors
/// `NotAccepted`.
pub async fn accept(ctx: &Ctx, arrived: Arrived) -> Result<Vec<Accepted>, NotAccepted> {
    let recipients = arrived.recipients.clone();
    let incoming = read(arrived).await?;
    let mut to: Vec<&str> = recipients.iter().map(String::as_str).collect();
    let facts = &incoming.read.facts;
    if to.is_empty() {
        to = facts.to.iter().chain(&facts.cc).map(|person| person.address.as_str()).collect();
    }
    let mailboxes = mailboxes_of(&ctx.config.email, &to);
    if mailboxes.is_empty() {
        return Err(NotAccepted::NoMailbox);
    }
    let mut accepted = Vec::new();
    for addressed in &mailboxes {
        accepted.push(accept_for(ctx, &incoming, addressed).await?);
    }
    Ok(accepted)
}

/// Parses a mail on a blocking thread.
///
/// # Errors
/// [`NotAccepted::Unreadable`], [`NotAccepted::ReadersBusy`] and [`NotAccepted::Defect`].
pub(super) async fn read(arrived: Arrived) -> Result<Incoming, NotAccepted> {
    if arrived.raw.len() > MAIL_BYTES {
        return Err(Unreadable::from(Hostile::TooLarge).into());
    }
    let Arrived { raw, mail_from, recipients: _, dmarc, unwanted } = arrived;
    let permit = tokio::time::timeout(READING_WAIT, READING.acquire()).await;
    let permit = permit.map_err(|_| NotAccepted::ReadersBusy)?;
    let read = tokio::task::spawn_blocking(move || {
        // Kept until parsing ends, even if the caller has gone.
        let _permit = permit;
        Ok::<_, Unreadable>((parse::read(&raw)?, bounce::read(&raw)))
    })
    .await;
    // A panic here is our own bug, and must not lose the mail.
    let read = read.map_err(|error| {
        warn!(%error, "A mail could not be read");
        NotAccepted::Defect
    })?;
    let (mut read, bounces) = read?;
    if mail_from.is_some() {
        read.facts.return_path = mail_from;
    }
    Ok(Incoming { read: Arc::new(read), bounces: bounces.into(), dmarc, unwanted })
}

/// Accepts a mail for one mailbox, in the mailbox's space.
///
/// # Errors
/// [`NotAccepted::Refused`].
pub(super) async fn accept_for(
    ctx: &Ctx,
    incoming: &Incoming,
    addressed: &Addressed<'_>,
) -> Result<Accepted, NotAccepted> {
    space::within(Scope::of(&addressed.space_id), accept_in(ctx, incoming, addressed)).await
}

async fn accept_in(
    ctx: &Ctx,
    incoming: &Incoming,
    addressed: &Addressed<'_>,
) -> Result<Accepted, NotAccepted> {
    let facts = &incoming.read.facts;
    let (settings, space_id) = (&ctx.config.email.incoming, addressed.space_id.as_str());
    // Take the permit before the first query: an overload then answers 429, and not "no connection". One
    // permit covers the whole mail. A mail that held one and waited for a second could block itself.
    let permit = ctx.intake.enter().await?;
    let key = key_in_mailbox(ctx, &incoming.read, addressed).await?;
    let dropped_before = match ctx.store.known_mail(space_id, &addressed.mailbox_id, &key).await? {
        Some(KnownMail::Woke(woken)) => return Ok(Accepted::Woke(woken)),
        Some(KnownMail::Dropped { reason }) => Some(reason),
        None => None,
    };
    let rules = MailboxRules {
        own: super::mailbox::own_addresses(&ctx.config.email),
        recipients: addressed.recipients.clone(),
        web: addressed.web.clone(),
    };
    let extracted = policy::extract(facts, &rules);
    let mut mail = new_mail(&incoming.read, addressed, key);
    let dmarc = auth::dmarc(facts, incoming.dmarc, &settings.trusted_authserv);
    let signed = signed(ctx, addressed).await?;
    let mut reasons: Vec<String> = incoming.unwanted.iter().chain(&extracted.machine).cloned().collect();
    reasons.extend(unproved(settings, dmarc, signed.is_some()));
    // A copy of the same mail may have come by another way before: by a list, or by a forwarder that broke its signature. Then
    // this copy is judged for itself.
    if let Some(reason) = dropped_before.filter(|_| !reasons.is_empty()) {
        return Ok(Accepted::Dropped { reason });
    }
    if !reasons.is_empty() {
        // Release the permit: a report may list a hundred of our mails, and each is recorded in its own
        // transaction.
        drop(permit);
        return dropped(ctx, &mail, incoming, &reasons).await;
    }
    let dmarc_passed = dmarc.passed();
    let asking = join(ctx, facts, signed, dmarc_passed, &mut mail).await?;
    let suspicion = suspicion(ctx, facts, dmarc_passed, asking.is_some(), &mut mail).await?;
    let message = NewMessage {
        client_key: Some(mail.message_id.clone()),
        text: text::render(facts, mail.joined),
        sender: mail.from_address.clone(),
        trace_context: None,
        attachments: incoming.read.files.clone(),
    };
    let route = reply_route(ctx, facts, addressed, dmarc_passed, &mail);
    if let Some(session_id) = asking.filter(|_| suspicion.is_empty()) {
        let wakes =
            MailWakes::Answer { session_id: &session_id, reply: route.as_ref(), proved: dmarc_passed };
        match ingest::accept_mail(ctx, &permit, &mail, wakes, message.clone()).await {
            Ok(woken) => return Ok(Accepted::Woke(woken)),
            // Somebody else answered the question meanwhile.
            Err(Refused::Store(Error::Conflict { .. } | Error::Refused { .. } | Error::Schedule { .. })) => {}
            Err(refused) => return Err(refused.into()),
        }
    }
    let policy = policy::of_session(&extracted, suspicion, route, mail.joined || dmarc_passed);
    let new = own_session(ctx, addressed, &mail, policy).await?;
    Ok(Accepted::Woke(ingest::accept_mail(ctx, &permit, &mail, MailWakes::OwnSession(&new), message).await?))
}

/// The key under which the mail is known in its mailbox.
///
/// Anybody can write any Message-ID, even one that they expect from somebody else. So a mail with a known
/// id but another sender or text gets a key made from its whole content.
async fn key_in_mailbox(ctx: &Ctx, read: &Read, addressed: &Addressed<'_>) -> Result<String, NotAccepted> {
    let key = key_of(read);
    let from = read.facts.from.as_ref().map(|from| from.address.as_str());
    let (space_id, mailbox_id) = (addressed.space_id.as_str(), &addressed.mailbox_id);
    if ctx.store.mail_is_other(space_id, mailbox_id, &key, from, &read.body_sha256).await? {
        return Ok(whole_key(read));
    }
    Ok(key)
}

/// The mail as it is stored, before anything is known of its conversation.
fn new_mail(read: &Read, addressed: &Addressed<'_>, key: String) -> NewMail {
    let facts = &read.facts;
    NewMail {
        space_id: addressed.space_id.clone(),
        mailbox_id: addressed.mailbox_id.clone(),
        message_id: key,
        conversation_id: String::new(),
        from_address: facts.from.as_ref().map(|from| from.address.clone()),
        subject: facts.subject.clone(),
        subject_key: hex::encode(Sha256::digest(subject_key(&facts.subject).as_bytes())),
        body_sha256: read.body_sha256.clone(),
        answered_key: None,
        answers: facts.answers().map(id_key).collect(),
        joined: false,
        sent_at: facts.date.clone(),
    }
}

/// Gives the mail its conversation: the one that it joins, or one of its own. Returns the session that has asked and gets the
/// mail as its answer, if there is one.
async fn join(
    ctx: &Ctx,
    facts: &MailFacts,
    signed: Option<String>,
    dmarc_passed: bool,
    mail: &mut NewMail,
) -> Result<Option<String>, NotAccepted> {
    let (space_id, mailbox_id) = (&mail.space_id, &mail.mailbox_id);
    let named = ctx.store.conversations_named(space_id, mailbox_id, &mail.answers).await?;
    let joined = thread::joins(facts, signed, dmarc_passed, &named);
    mail.joined = joined.is_some();
    mail.conversation_id = joined
        .clone()
        .unwrap_or_else(|| format!("{space_id}/{}", thread::conversation_id(mailbox_id, &mail.message_id)));
    Ok(match &joined {
        Some(conversation_id) => {
            let proved = mail.from_address.as_deref().filter(|_| dmarc_passed);
            ctx.store.asking_session(conversation_id, &mail.answers, proved).await?
        }
        None => None,
    })
}

/// Why the mail gets no reply: it may be a part of a loop, or one of too many of a sender whom nothing proves. Empty: it gets one.
/// Sets whose answers the mail is counted with. `is_answer`: a session has asked for it.
async fn suspicion(
    ctx: &Ctx,
    facts: &MailFacts,
    dmarc_passed: bool,
    is_answer: bool,
    mail: &mut NewMail,
) -> Result<Vec<String>, NotAccepted> {
    let settings = &ctx.config.email.incoming;
    let answered = policy::answered(facts, dmarc_passed).map(|to| policy::person_of(&to.address));
    mail.answered_key = answered.as_ref().map(|person| hex::encode(Sha256::digest(person)));
    let mut exchange = ctx.store.exchange(mail).await?;
    // Do not count repeated texts here. Empty texts are no repetition, and two questions may have the same
    // answer.
    if facts.body.trim().is_empty() || is_answer {
        exchange.same_body = 0;
    }
    let mut suspicion = policy::loop_suspicion(exchange, settings.loop_limit);
    let is_answered = mail.from_address.as_deref().map(policy::person_of) == answered;
    if dmarc_passed {
        // DMARC proves that the sender wrote those himself. So only the answers to the address that he names
        // are counted.
        exchange.of_sender = 0;
    }
    let is_proved = mail.joined || (dmarc_passed && is_answered);
    if !is_proved {
        suspicion.extend(policy::sender_suspicion(exchange, settings.sender_limit));
    }
    Ok(suspicion)
}

/// The way of the session's replies. An answer to them comes back to the conversation, by a signed address.
fn reply_route(
    ctx: &Ctx,
    facts: &MailFacts,
    addressed: &Addressed<'_>,
    dmarc_passed: bool,
    mail: &NewMail,
) -> Option<ReplyRoute> {
    let reply_to = ctx
        .config
        .email
        .incoming
        .thread_key()
        .zip(addressed.address.as_deref())
        .and_then(|(secret, address)| thread::plus_address(secret, address, &mail.conversation_id));
    let from = addressed.from(&ctx.config.email);
    policy::reply_route(facts, &from, dmarc_passed, reply_to)
}

/// The session that the mail begins if it answers no question.
async fn own_session(
    ctx: &Ctx,
    addressed: &Addressed<'_>,
    mail: &NewMail,
    policy: SessionPolicy,
) -> Result<NewSession, NotAccepted> {
    let trigger = Trigger {
        mailbox_id: addressed.mailbox_id.clone(),
        trigger_type: "email",
        trigger_id: mail.message_id.clone(),
        continues: Continues::Trigger,
        policy,
        thread: if mail.joined { earlier(ctx, &mail.conversation_id).await? } else { Vec::new() },
    };
    let agent = addressed.agent.as_deref();
    let conversation_id = mail.conversation_id.clone();
    let new = new_session::of_trigger(&ctx.config, &ctx.plugins.tools, conversation_id, agent, trigger)?;
    // A sender who joins the thread is proved to be part of it, also of a thread that began in a user's chat.
    Ok(NewSession { speaker: mail.joined.then_some(Speaker::Application), ..new })
}

/// Why a mail is withheld if its sender is not proved. Otherwise a stranger could name any address as the
/// sender, and we would send a signed answer to it.
fn unproved(settings: &Settings, dmarc: Dmarc, is_signed: bool) -> Option<String> {
    match dmarc {
        Dmarc::Failed if settings.dmarc_fail == Unproved::Drop => {
            Some("its sender is forged: DMARC failed (email.dmarc_fail)".to_owned())
        }
        Dmarc::Unknown if settings.unproved == Unproved::Drop && !is_signed => {
            Some("nothing proves its sender (email.unproved)".to_owned())
        }
        Dmarc::Passed | Dmarc::Failed | Dmarc::Unknown => None,
    }
}

/// Records a mail that no agent sees. Its bounces are recorded first: if the process dies in between, the
/// mail's server hands it over again.
async fn dropped(
    ctx: &Ctx,
    mail: &NewMail,
    incoming: &Incoming,
    reasons: &[String],
) -> Result<Accepted, NotAccepted> {
    for one in incoming.bounces.iter() {
        bounce::take_bounce(ctx, one).await?;
    }
    let mut reason = reasons.join("; ");
    if let Some(about) = incoming.read.facts.reported.first() {
        reason.push_str(&format!("; it is about {about}"));
    }
    let _permit = ctx.intake.enter().await?;
    ctx.store.drop_mail(mail, &reason).await?;
    info!(mailbox = %mail.mailbox_id, message_id = %mail.message_id, reason, "A mail was dropped");
    Ok(Accepted::Dropped { reason })
}

/// The conversation named by the plus-address, if we signed it and the mailbox has that conversation.
async fn signed(ctx: &Ctx, addressed: &Addressed<'_>) -> Result<Option<String>, NotAccepted> {
    let settings = &ctx.config.email.incoming;
    let (Some(secret), Some(address), Some(token)) =
        (settings.thread_key(), &addressed.address, addressed.token)
    else {
        return Ok(None);
    };
    let Some(conversation_id) = thread::conversation_of_token(secret, address, &addressed.space_id, token)
    else {
        return Ok(None);
    };
    let has = ctx.store.has_conversation(&addressed.mailbox_id, &conversation_id).await?;
    Ok(has.then_some(conversation_id))
}

/// The earlier mails of the conversation, newest last, cut to what a new session in the thread gets.
async fn earlier(ctx: &Ctx, conversation_id: &str) -> Result<Vec<Seed>, NotAccepted> {
    let said = ctx.store.mail_thread(conversation_id, THREAD_MAILS).await?;
    let mut left = THREAD_BYTES;
    let mut seeds: Vec<Seed> = said
        .into_iter()
        .rev()
        .map_while(|one| {
            let mut content = one.text;
            if content.len() > THREAD_MAIL_BYTES {
                content.truncate(content.floor_char_boundary(THREAD_MAIL_BYTES));
                content.push_str("\n[…]");
            }
            left = left.checked_sub(content.len())?;
            let role = if one.role == Role::Assistant { Role::Assistant } else { Role::User };
            Some(Seed { role, content, is_new: true })
        })
        .collect();
    seeds.reverse();
    Ok(seeds)
}

/// The key of a mail: its Message-ID, or a hash of the whole mail.
fn key_of(read: &Read) -> String {
    read.facts.message_id.as_deref().map_or_else(|| whole_key(read), id_key)
}

fn whole_key(read: &Read) -> String {
    format!("sha256:{}", read.sha256)
}

fn id_key(id: &str) -> String {
    if id.len() <= KEY_BYTES {
        id.to_owned()
    } else {
        format!("sha256:{}", hex::encode(Sha256::digest(id.as_bytes())))
    }
}
