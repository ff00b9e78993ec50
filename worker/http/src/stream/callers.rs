//! How many streams each caller has, and which of them end because a token is no longer in force.
//!
//! A caller may not take the places of all others: a user gets `server.user_streams`, a token half of `server.streams`. The streams
//! of users also count for the application's token that asked for the users' tokens. Otherwise it could take all places for users
//! that it makes up. The configured token and this machine may have all places.
//!
//! A stream that shows nothing looks nothing up. So one query each [`LOOKS_EVERY`] asks for all tokens that have streams.

use crate::access::{Caller, Who};
use crate::holder::Holder;
use chrono::{DateTime, Utc};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::debug;
use wakeful_engine::ctx::Ctx;

/// How often the query asks.
pub(super) const LOOKS_EVERY: Duration = Duration::from_secs(2);

/// The callers that have streams.
#[derive(Debug)]
pub(super) struct Callers {
    of_a_user: usize,
    of_a_token: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    counts: HashMap<Holder, usize>,
    /// The tokens that streams depend on, and how many streams.
    tokens: HashMap<String, (CancellationToken, usize)>,
}

/// A caller's place for one stream. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Place {
    callers: Arc<Callers>,
    holders: Vec<Holder>,
    token_id: Option<String>,
    revoked: CancellationToken,
    expires_at: Option<DateTime<Utc>>,
}

impl Callers {
    pub(super) fn new(streams: usize, of_a_user: usize) -> Arc<Callers> {
        Arc::new(Callers { of_a_user, of_a_token: (streams / 2).max(1), open: Mutex::default() })
    }

    /// Takes a place.
    ///
    /// # Errors
    /// The most that this caller may have.
    pub(super) fn enter(self: &Arc<Callers>, caller: &Caller) -> Result<Place, usize> {
        let token_id = match &caller.who {
            Who::ThisMachine | Who::Configuration => None,
            Who::Token { token_id, .. } => Some(token_id),
            Who::User { issuer, .. } => issuer.as_ref(),
        };
        let holders = Holder::all(caller);
        let mut open = self.open();
        for holder in &holders {
            let most = match holder {
                Holder::Token(_) => self.of_a_token,
                Holder::User { .. } => self.of_a_user,
            };
            if open.counts.get(holder).is_some_and(|count| *count >= most) {
                return Err(most);
            }
        }
        for holder in &holders {
            *open.counts.entry(holder.clone()).or_default() += 1;
        }
        let revoked = match token_id {
            Some(token_id) => {
                let (revoked, streams) = open.tokens.entry(token_id.clone()).or_default();
                *streams += 1;
                revoked.clone()
            }
            None => CancellationToken::new(),
        };
        Ok(Place {
            callers: Arc::clone(self),
            holders,
            token_id: token_id.cloned(),
            revoked,
            expires_at: caller.expires_at,
        })
    }

    /// Ends the streams whose token is no longer in force.
    pub(super) async fn look(&self, ctx: &Ctx) {
        let asked: Vec<String> = self.open().tokens.keys().cloned().collect();
        if asked.is_empty() {
            return;
        }
        match ctx.store.tokens_in_force(&asked).await {
            Ok(in_force) => {
                let open = self.open();
                for token_id in asked.iter().filter(|token_id| !in_force.contains(token_id)) {
                    if let Some((revoked, _)) = open.tokens.get(token_id) {
                        revoked.cancel();
                    }
                }
            }
            Err(error) => {
                debug!(%error, "The tokens of streams could not be looked up; again in two seconds")
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Waits until the caller's token is no longer in force.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + use<> {
        let (revoked, expires_at) = (self.revoked.clone(), self.expires_at);
        async move {
            let expires = async {
                match expires_at {
                    Some(at) => tokio::time::sleep((at - Utc::now()).to_std().unwrap_or_default()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = revoked.cancelled() => {}
                () = expires => {}
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.callers.open();
        for holder in &self.holders {
            if let Some(count) = open.counts.get_mut(holder) {
                *count -= 1;
                if *count == 0 {
                    open.counts.remove(holder);
                }
            }
        }
        if let Some(token_id) = &self.token_id
            && let Some((_, streams)) = open.tokens.get_mut(token_id)
        {
            *streams -= 1;
            if *streams == 0 {
                open.tokens.remove(token_id);
            }
        }
    }
}
