//! Users' tokens that another system signs: JSON Web Tokens of the configured issuer.
//!
//! A token names the key that signed it, and the issuer's key set has the public half. The keys are read when the first
//! token comes, again when they are old, and again when a token names a key that is not among them. Strangers can make up
//! names of keys, so two readings are at least `refetch_s` apart, and one runs at a time.

use crate::problem::Problem;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{AlgorithmParameters, Jwk, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Header, Validation};
use serde_json::{Map, Value};
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tracing::{debug, warn};
use wakeful_config::users::{Jwt, JwtKeys};
use wakeful_engine::web::fetch_named;
use wakeful_workflow::access::is_space;

/// The largest set of keys.
const KEYS_BYTES: usize = 256 << 10;
/// The most keys of a set.
const KEYS: usize = 100;
/// The longest time of a reading.
const READING: Duration = Duration::from_secs(5);
/// How long the old keys are used while they cannot be read again.
const KEPT: Duration = Duration::from_secs(3600);
/// The longest token that is looked at.
const TOKEN_BYTES: usize = 16 << 10;

/// Who bears a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bearer {
    pub user_id: String,
    pub space_id: String,
    pub agent: Option<String>,
    pub expires_at: DateTime<Utc>,
}

/// The configured issuer, with its keys as they were read last.
pub(crate) struct Issuer {
    settings: Jwt,
    algorithms: Vec<Algorithm>,
    read: RwLock<Option<Arc<Set>>>,
    /// Locked while the keys are read. Its value is the time of the last try.
    reading: Mutex<Option<Instant>>,
}

struct Set {
    at: Instant,
    keys: Vec<Key>,
}

struct Key {
    id: Option<String>,
    /// `None`: any algorithm of its family.
    algorithm: Option<Algorithm>,
    key: DecodingKey,
}

/// Returns whether a text looks like a JSON Web Token: three parts, the first of which begins an object in Base64.
pub(crate) fn is_jwt(text: &str) -> bool {
    text.starts_with("eyJ") && text.bytes().filter(|&byte| byte == b'.').count() == 2
}

impl Issuer {
    pub(crate) fn new(settings: Jwt) -> Issuer {
        let algorithms =
            settings.algorithms.iter().filter_map(|name| Algorithm::from_str(name).ok()).collect();
        Issuer { settings, algorithms, read: RwLock::default(), reading: Mutex::new(None) }
    }

    /// Checks a token: its signature, issuer, audience and times. Says who bears it.
    ///
    /// # Errors
    /// 401 that says what is wrong, 503 if the issuer's keys cannot be had.
    pub(crate) async fn bearer(self: &Arc<Issuer>, token: &str) -> Result<Bearer, Problem> {
        if token.len() > TOKEN_BYTES {
            return Err(refused("this user's token is too long"));
        }
        let header = jsonwebtoken::decode_header(token)
            .map_err(|_| refused("the head of this user's token is not one of a JWT that can be checked"))?;
        // The token must not choose how it is checked: the configuration does.
        if !self.algorithms.contains(&header.alg) {
            let known = self.settings.algorithms.join(", ");
            return Err(refused(&format!(
                "this user's token is signed by {:?}; it may be {known}",
                header.alg
            )));
        }
        if header.crit.is_some() {
            return Err(refused("the head of this user's token demands what is not known here"));
        }
        let set = self.keys(&header).await?;
        let Some(key) = set.find(&header) else {
            return Err(refused("this user's token names a key that its issuer has not"));
        };
        let mut validation = Validation::new(header.alg);
        validation.leeway = self.settings.leeway.as_secs();
        validation.validate_nbf = true;
        validation.set_audience(&self.settings.audience);
        validation.set_issuer(&[&self.settings.issuer]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        let decoded = jsonwebtoken::decode::<Map<String, Value>>(token, &key.key, &validation);
        let claims = decoded.map_err(|error| refused(reason(error.kind())))?.claims;
        // The library also takes a list of issuers that has this one.
        if claims.get("iss").and_then(Value::as_str) != Some(self.settings.issuer.as_str()) {
            return Err(refused(reason(&ErrorKind::InvalidIssuer)));
        }
        self.bearer_of(&claims)
    }

    fn bearer_of(&self, claims: &Map<String, Value>) -> Result<Bearer, Problem> {
        let settings = &self.settings;
        let expires_at = claims.get("exp").and_then(Value::as_f64).map(|at| at as i64);
        let expires_at = expires_at.and_then(|at| DateTime::from_timestamp(at, 0));
        let expires_at = expires_at.ok_or_else(|| refused("this user's token has no `exp`"))?;
        let latest = Utc::now() + settings.longest + settings.leeway;
        if expires_at > latest {
            let seconds = settings.longest.as_secs();
            return Err(refused(&format!("this user's token is valid for more than {seconds} s from now")));
        }
        let text = |name: &str| claims.get(name).and_then(Value::as_str);
        let named = |name: &str| {
            let fits = |text: &&str| (1..=256).contains(&text.len()) && !text.chars().any(char::is_control);
            let wrong =
                || refused(&format!("the claim {name:?} of this user's token is not a text that fits"));
            text(name).filter(fits).map(str::to_owned).ok_or_else(wrong)
        };
        let space_id = match &settings.space_claim {
            Some(name) => text(name)
                .filter(|space| is_space(space))
                .map(str::to_owned)
                .ok_or_else(|| refused(&format!("the claim {name:?} of this user's token names no space")))?,
            None => settings.space.clone(),
        };
        let agent = match &settings.agent_claim {
            Some(name) if claims.contains_key(name) => Some(named(name)?),
            _ => None,
        };
        Ok(Bearer { user_id: named(&settings.user_claim)?, space_id, agent, expires_at })
    }

    /// The keys for a token with this head: those that were read, or new ones if the token's is not among them.
    async fn keys(self: &Arc<Issuer>, header: &Header) -> Result<Arc<Set>, Problem> {
        if let Some(set) = self.known()
            && set.at.elapsed() < KEPT
            && set.find(header).is_some()
        {
            if set.at.elapsed() > self.settings.refresh {
                // This request need not wait for it.
                let issuer = Arc::clone(self);
                tokio::spawn(async move {
                    if let Ok(mut tried) = issuer.reading.try_lock() {
                        issuer.read_again(&mut tried).await;
                    }
                });
            }
            return Ok(set);
        }
        let mut tried = self.reading.lock().await;
        // Another request may have read them while this one waited.
        let fits = |set: &Arc<Set>| set.at.elapsed() < KEPT && set.find(header).is_some();
        if self.known().as_ref().is_none_or(|set| !fits(set)) {
            self.read_again(&mut tried).await;
        }
        drop(tried);
        self.known().filter(|set| set.at.elapsed() < KEPT).ok_or_else(|| {
            let after = u32::try_from(self.settings.refetch.as_secs()).unwrap_or(u32::MAX).max(1);
            Problem::unavailable("the keys of the issuer of this user's token cannot be read now", after)
        })
    }

    fn known(&self) -> Option<Arc<Set>> {
        self.read.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the keys, unless that was tried a moment ago. Keys that cannot be read leave the old ones in place.
    async fn read_again(&self, tried: &mut Option<Instant>) {
        if tried.is_some_and(|at| at.elapsed() < self.settings.refetch) {
            return;
        }
        // Set before the reading: a request that goes away in the middle must not make the next one read at once.
        *tried = Some(Instant::now());
        match read_keys(&self.settings.keys).await {
            Ok(keys) => {
                debug!(keys = keys.len(), "The keys of the issuer of users' tokens are read");
                let set = Arc::new(Set { at: Instant::now(), keys });
                *self.read.write().unwrap_or_else(PoisonError::into_inner) = Some(set);
            }
            Err(error) => warn!(error, "The keys of the issuer of users' tokens cannot be read"),
        }
    }
}

impl Set {
    /// The key that a token names. A token without a name is checked with the only key that fits.
    fn find(&self, header: &Header) -> Option<&Key> {
        let mut fitting = self.keys.iter().filter(|key| {
            key.algorithm.is_none_or(|algorithm| algorithm == header.alg)
                && header.kid.as_ref().is_none_or(|id| key.id.as_ref() == Some(id))
        });
        let first = fitting.next()?;
        (header.kid.is_some() || fitting.next().is_none()).then_some(first)
    }
}

async fn read_keys(keys: &JwtKeys) -> Result<Vec<Key>, String> {
    let text = match keys {
        JwtKeys::Url(url) => fetch_named(url, KEYS_BYTES, READING).await?,
        JwtKeys::File(file) => tokio::fs::read(file).await.map_err(|error| error.to_string())?,
    };
    keys_of(&text)
}

/// Reads the keys of the configured issuer, and returns how many of them can check a token.
///
/// # Errors
/// A sentence that says why they cannot be read.
pub async fn count_keys(settings: &Jwt) -> Result<usize, String> {
    let algorithms = Issuer::new(settings.clone()).algorithms;
    let fits = |key: &Key| key.algorithm.is_none_or(|algorithm| algorithms.contains(&algorithm));
    Ok(read_keys(&settings.keys).await?.iter().filter(|key| fits(key)).count())
}

/// The keys of a set that can check signatures. Others, and entries that are not keys, are passed over.
fn keys_of(text: &[u8]) -> Result<Vec<Key>, String> {
    let set: Value = serde_json::from_slice(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let listed = set["keys"].as_array().ok_or("it has no list `keys`")?;
    Ok(listed.iter().take(KEYS).filter_map(key_of).collect())
}

fn key_of(listed: &Value) -> Option<Key> {
    let jwk: Jwk = serde_json::from_value(listed.clone()).ok()?;
    if !matches!(jwk.common.public_key_use, None | Some(PublicKeyUse::Signature)) {
        return None;
    }
    let algorithm = match jwk.common.key_algorithm {
        Some(named) => Some(Algorithm::from_str(&named.to_string()).ok()?),
        None => None,
    };
    // A secret in a public set would let all who read it sign.
    if matches!(jwk.algorithm, AlgorithmParameters::OctetKey(_)) {
        return None;
    }
    let key = DecodingKey::from_jwk(&jwk).ok()?;
    Some(Key { id: jwk.common.key_id, algorithm, key })
}

fn refused(detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, detail)
}

/// What is wrong with a token, in words that tell its bearer nothing that the token itself does not.
fn reason(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::ExpiredSignature => "this user's token has expired",
        ErrorKind::ImmatureSignature => "this user's token is not valid yet",
        ErrorKind::InvalidIssuer => "this user's token is of another issuer",
        ErrorKind::InvalidAudience => "this user's token is for another audience",
        ErrorKind::MissingRequiredClaim(_) => "this user's token lacks `exp`, `iss` or `aud`",
        ErrorKind::InvalidSignature | ErrorKind::InvalidAlgorithm => {
            "the signature of this user's token does not fit"
        }
        _ => "this user's token cannot be read",
    }
}
