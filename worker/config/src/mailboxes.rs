//! The keys of `[email]` about incoming mail, and `[email.mailboxes.NAME]`.

use super::address::is_address;
use super::read::Section;
use super::routes::Route;
use super::webhook::webhook_key;
use ipnet::IpNet;
use secrecy::{ExposeSecret, SecretString};
use std::net::{IpAddr, SocketAddr};
use wakeful_workflow::id::DEFAULT_SPACE;
use wakeful_workflow::policy::WebPolicy;

const SENDER_LIMIT: i64 = 30;

const UNPROVED_RULE: &str = "must be \"drop\" or \"take\"";

/// How mail comes in.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// The address of the LMTP listener.
    pub lmtp_listen: Option<SocketAddr>,
    /// The mail servers that may speak to it. Empty: those on this machine.
    pub lmtp_peers: Vec<IpNet>,
    /// Secrets of `POST /v1/triggers/email/raw`, in the form of Standard Webhooks; several, for rotation.
    pub raw_secrets: Vec<SecretString>,
    /// Signs the reply addresses that lead an answer back into its conversation.
    pub thread_secret: Option<SecretString>,
    /// The servers whose `Authentication-Results` headers are trusted.
    pub trusted_authserv: Vec<String>,
    /// More mails than this from one sender in one exchange within an hour get no reply.
    pub loop_limit: i64,
    /// More mails than this from one sender within an hour get no reply, unless their sender is proved.
    pub sender_limit: i64,
    /// What becomes of a mail that DMARC says is forged.
    pub dmarc_fail: Unproved,
    /// What becomes of a mail whose sender nothing proves.
    pub unproved: Unproved,
    pub mailboxes: Vec<Mailbox>,
}

/// What becomes of a mail whose sender is not proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unproved {
    /// It is recorded, with the reason, and no agent sees it.
    Drop,
    /// It is taken, and answered.
    Take,
}

/// `[email.mailboxes.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mailbox {
    /// The NAME of its section.
    pub name: String,
    /// A plain address in lower case. Also the stored `mailbox_id`.
    pub address: String,
    pub agent: Option<String>,
    /// The space of its mails. `None`: the default one.
    pub space: Option<String>,
    /// The addresses that its sessions may mail, instead of the agent's recipients.
    pub recipients: Option<Vec<String>>,
    /// The hosts that its sessions' tools may contact, of those that the agent's may.
    pub web: Option<WebPolicy>,
}

impl Default for Incoming {
    fn default() -> Incoming {
        Incoming {
            lmtp_listen: None,
            lmtp_peers: Vec::new(),
            raw_secrets: Vec::new(),
            thread_secret: None,
            trusted_authserv: Vec::new(),
            loop_limit: 10,
            sender_limit: SENDER_LIMIT,
            dmarc_fail: Unproved::Drop,
            unproved: Unproved::Take,
            mailboxes: Vec::new(),
        }
    }
}

/// Reads these keys from `[email]`.
pub(super) fn read(section: &mut Section<'_>, outer: &Route) -> Incoming {
    let rule = "must be an address and a port, such as 127.0.0.1:2424";
    let raw_origin = section.origin("raw_secrets").or_else(|| section.origin("raw_secrets_file"));
    let incoming = Incoming {
        lmtp_listen: section.text("lmtp_listen", rule, |text| text.parse().ok()),
        lmtp_peers: peers(section),
        raw_secrets: section.secrets("raw_secrets"),
        thread_secret: section.secret("thread_secret", |secret| {
            (secret.len() < 16).then_some("must have at least 16 characters")
        }),
        trusted_authserv: section.list("trusted_authserv").unwrap_or_default(),
        loop_limit: section.number("loop_limit", 1..=10_000).unwrap_or(10),
        sender_limit: section.number("sender_limit", 1..=1_000_000).unwrap_or(SENDER_LIMIT),
        dmarc_fail: section.text("dmarc_fail", UNPROVED_RULE, unproved).unwrap_or(Unproved::Drop),
        unproved: section.text("unproved", UNPROVED_RULE, unproved).unwrap_or(Unproved::Take),
        mailboxes: mailboxes(section, outer),
    };
    if incoming.raw_secrets.iter().any(|secret| webhook_key(secret).is_none())
        && let Some(origin) = raw_origin
    {
        let key = section.full("raw_secrets");
        section.problem(
            origin,
            format!("{key} must each be whsec_ and 24 bytes or more in base64 (their values are not shown)"),
        );
    }
    incoming
}

fn peers(section: &mut Section<'_>) -> Vec<IpNet> {
    let origin = section.origin("lmtp_peers");
    let given = section.list("lmtp_peers").unwrap_or_default();
    let parse = |text: &String| text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
    let peers: Vec<IpNet> = given.iter().filter_map(parse).collect();
    if peers.len() < given.len()
        && let Some(origin) = origin
    {
        let key = section.full("lmtp_peers");
        section.problem(
            origin,
            format!("{key} must be addresses and networks, such as 10.0.0.5 and 10.1.0.0/16"),
        );
    }
    peers
}

fn unproved(text: &str) -> Option<Unproved> {
    match text {
        "drop" => Some(Unproved::Drop),
        "take" => Some(Unproved::Take),
        _ => None,
    }
}

fn mailboxes(section: &mut Section<'_>, outer: &Route) -> Vec<Mailbox> {
    let mut mailboxes: Vec<Mailbox> = Vec::new();
    for (name, origin, mut section) in section.sections("mailboxes") {
        let rule = "must be a plain mail address, such as support@example.org";
        let address =
            section.text("address", rule, |text| is_address(text).then(|| text.to_ascii_lowercase()));
        let (agent, space) = super::read::route(&mut section, Some(outer));
        let mailbox = Mailbox {
            name,
            address: address.unwrap_or_default(),
            agent,
            space,
            recipients: super::read::recipients(&mut section),
            web: super::web::policy(&mut section),
        };
        if mailbox.address.is_empty() || mailboxes.iter().any(|other| other.address == mailbox.address) {
            let key = section.full("address");
            section.problem(origin, format!("{key} must be a mail address that no other mailbox has"));
        }
        section.finish();
        mailboxes.push(mailbox);
    }
    mailboxes
}

impl Mailbox {
    /// The space of its mails.
    pub fn space(&self) -> &str {
        self.space.as_deref().unwrap_or(DEFAULT_SPACE)
    }
}

impl Incoming {
    /// Returns whether this mail server may hand over mail by LMTP. Its mails may say that a trusted server
    /// checked them, so not everybody may.
    pub fn is_lmtp_peer(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        if self.lmtp_peers.is_empty() {
            return address.is_loopback();
        }
        self.lmtp_peers.iter().any(|peers| peers.contains(&address))
    }

    /// The key that signs reply addresses.
    pub fn thread_key(&self) -> Option<&[u8]> {
        self.thread_secret.as_ref().map(|secret| secret.expose_secret().as_bytes())
    }
}
