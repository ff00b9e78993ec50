//! Who asks: the caller behind a token, and what the caller may do.
//!
//! The configured token is one admin token. Other tokens are rows that `wakeful token` makes, and tokens of users are
//! signed. Each request looks its token up, so a revoked one is refused at once.

mod jwt;
mod rules;

pub(crate) use jwt::Issuer;
pub use jwt::count_keys;
pub use rules::{OpenTo, RULES, Rule};

use crate::problem::Problem;
use axum::extract::FromRequestParts;
use axum::http::header::{AUTHORIZATION, FORWARDED, HeaderName};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use chrono::{DateTime, Utc};
use secrecy::ExposeSecret;
use std::sync::Arc;
use subtle::ConstantTimeEq;
use wakeful_config::DEFAULT_AGENT;
use wakeful_engine::ctx::Ctx;
use wakeful_store::token::{Presented, Token, UserClaims, UserToken, is_user_token};
use wakeful_workflow::access::{Reach, Scope, Speaker, is_reserved, is_space};
use wakeful_workflow::id::{DEFAULT_SPACE, conversation_id_in};

/// The header in which a token of the whole installation names a space.
pub const SPACE: &str = "x-wakeful-space";

/// Who a caller is.
#[derive(Clone, Debug, PartialEq)]
pub enum Who {
    /// No token is configured, so only this machine can ask.
    ThisMachine,
    /// The token of the configuration.
    Configuration,
    Token {
        token_id: String,
        name: Option<String>,
    },
    User {
        user_id: String,
        issuer: Option<String>,
    },
}

/// Who asks, and what the caller reaches. The guard puts it into the request.
#[derive(Clone, Debug, PartialEq)]
pub struct Caller {
    pub who: Who,
    pub scope: Scope,
    /// Always names a space.
    pub reach: Reach,
    /// The token is of the whole installation, and `reach.space_id` is what this request asked for.
    pub everywhere: bool,
    pub expires_at: Option<DateTime<Utc>>,
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Problem> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| Problem::new(StatusCode::UNAUTHORIZED, "this route knows no caller"))
    }
}

impl Caller {
    pub(crate) fn of_installation(who: Who) -> Caller {
        Caller { who, scope: Scope::Admin, reach: Reach::default(), everywhere: true, expires_at: None }
    }

    fn of_token(token: Token) -> Caller {
        Caller {
            everywhere: token.space_id.is_none(),
            reach: Reach { space_id: token.space_id, agent: token.agent, user_id: None },
            who: Who::Token { token_id: token.token_id, name: token.name },
            scope: token.scope,
            expires_at: token.expires_at,
        }
    }

    fn of_user(claims: UserClaims) -> Caller {
        let expires_at = Some(claims.expires());
        Caller {
            // Its token reaches only the routes that are open to users, so it may `operate` on those.
            scope: Scope::Operate,
            reach: Reach {
                space_id: Some(claims.space_id),
                agent: claims.agent,
                user_id: Some(claims.user_id.clone()),
            },
            everywhere: false,
            who: Who::User { user_id: claims.user_id, issuer: claims.issuer },
            expires_at,
        }
    }

    fn of_bearer(bearer: jwt::Bearer) -> Caller {
        Caller {
            scope: Scope::Operate,
            reach: Reach {
                space_id: Some(bearer.space_id),
                agent: bearer.agent,
                user_id: Some(bearer.user_id.clone()),
            },
            everywhere: false,
            who: Who::User { user_id: bearer.user_id, issuer: None },
            expires_at: Some(bearer.expires_at),
        }
    }

    /// Finds out who asks.
    ///
    /// # Errors
    /// 401 for a missing, unknown, expired or revoked token, 503 if it cannot be checked now; 400 for a header that names no space, 403 for one that
    /// names a space beyond the token's.
    pub(crate) async fn identify(
        ctx: &Ctx,
        issuer: Option<&Arc<Issuer>>,
        headers: &HeaderMap,
    ) -> Result<Caller, Problem> {
        let caller = match issuer {
            Some(issuer)
                if jwt::is_jwt(given_token(headers)) && !is_configured(ctx, given_token(headers)) =>
            {
                Caller::of_bearer(issuer.bearer(given_token(headers)).await?)
            }
            _ => Caller::of_headers(ctx, headers).await?,
        };
        caller.in_space(headers)
    }

    async fn of_headers(ctx: &Ctx, headers: &HeaderMap) -> Result<Caller, Problem> {
        let given = given_token(headers);
        let refused = |detail: &str| Err(Problem::new(StatusCode::UNAUTHORIZED, detail));
        if is_configured(ctx, given) {
            return Ok(Caller::of_installation(Who::Configuration));
        }
        if is_user_token(given) {
            return match ctx.store.find_user_token(given).await? {
                UserToken::Valid(claims)
                    if claims.issuer.is_none()
                        && claims.configured != configured_fingerprint(ctx).await? =>
                {
                    refused("the configured token that asked for this user's token was replaced")
                }
                UserToken::Valid(claims) => Ok(Caller::of_user(claims)),
                UserToken::Expired => refused("this user's token has expired"),
                UserToken::Revoked => {
                    refused("the token that asked for this user's token is no longer in force")
                }
                UserToken::Unknown => refused("this user's token is not signed by this installation"),
            };
        }
        if given.starts_with(wakeful_store::token::PREFIX) {
            return match ctx.store.find_token(given).await? {
                Presented::Valid(token) => Ok(Caller::of_token(token)),
                Presented::Expired => refused("this token has expired"),
                Presented::Revoked => refused("this token was revoked"),
                Presented::Unknown => refused("this token is unknown"),
            };
        }
        // A wrong token is a mistake or an attack. So it is refused, even where no token is needed.
        if headers.contains_key(AUTHORIZATION) && !given.is_empty() {
            return refused(
                "this bearer token is not the server's (WAKEFUL_TOKEN), and `wakeful token create` did not make it",
            );
        }
        if headers.contains_key(AUTHORIZATION) || ctx.config.server.token.is_some() {
            return refused("a bearer token is needed: `Authorization: Bearer …`");
        }
        if headers.keys().any(is_of_a_proxy) {
            return refused(
                "a proxy passed this request on, so it needs a bearer token; set WAKEFUL_TOKEN to serve others",
            );
        }
        Ok(Caller::of_installation(Who::ThisMachine))
    }

    fn in_space(mut self, headers: &HeaderMap) -> Result<Caller, Problem> {
        match (&self.reach.space_id, named_space(headers)?) {
            (Some(own), Some(named)) if own != named => {
                let detail = format!("this token is of the space {own} only");
                return Err(Problem::new(StatusCode::FORBIDDEN, detail));
            }
            (Some(_), _) => {}
            (None, named) => self.reach.space_id = Some(named.unwrap_or(DEFAULT_SPACE).to_owned()),
        }
        Ok(self)
    }

    /// The space that this request is about.
    pub fn space(&self) -> &str {
        self.reach.space_id.as_deref().unwrap_or(DEFAULT_SPACE)
    }

    /// The space that the parameter `space` names, or that of the request. Rows of it are seen within its scope
    /// ([`wakeful_store::space::within`]): the request's own is that of the header.
    ///
    /// # Errors
    /// 400 for what cannot be a space, 403 for a space beyond the token's.
    pub fn asked_space<'a>(&'a self, asked: Option<&'a str>) -> Result<&'a str, Problem> {
        match asked {
            Some(asked) if !is_space(asked) => Err(no_space("space", asked)),
            Some(asked) if !self.everywhere && asked != self.space() => {
                let said = format!("this token is for the space {} only", self.space());
                Err(Problem::new(StatusCode::FORBIDDEN, said))
            }
            asked => Ok(asked.unwrap_or(self.space())),
        }
    }

    /// The stored id of a conversation of the caller's space.
    ///
    /// # Errors
    /// 400 for an id that cannot be one.
    pub fn conversation(&self, id: &str) -> Result<String, Problem> {
        Ok(conversation_id_in(self.space(), id)?)
    }

    /// The agent of a new session: `asked`, or the token's own. A user does not choose: the application does, by the agent
    /// of the user's token, or by the agent `default` if that names none.
    ///
    /// # Errors
    /// 403 for an agent that is not the token's.
    pub fn agent<'a>(&'a self, asked: Option<&'a str>) -> Result<Option<&'a str>, Problem> {
        let refused = |detail: String| Err(Problem::new(StatusCode::FORBIDDEN, detail));
        match (self.reach.agent.as_deref(), asked) {
            (Some(own), Some(asked)) if own != asked => {
                refused(format!("this token is for the agent {own} only"))
            }
            (None, Some(asked)) if self.reach.user_id.is_some() && asked != DEFAULT_AGENT => {
                refused(format!(
                    "this user's token names no agent, so what it begins is for the agent {DEFAULT_AGENT}: \
                 the application asks for a token with \"agent\" to let the user talk to another one"
                ))
            }
            (own, asked) => Ok(own.or(asked)),
        }
    }

    /// In whose name this caller writes a message: the token's user, or the user that the body names, or the application.
    ///
    /// # Errors
    /// 403 for another user than the token's.
    pub fn speaker(&self, named: Option<&str>, shared: bool) -> Result<Speaker, Problem> {
        match (self.reach.user_id.as_deref(), named) {
            (Some(own), Some(named)) if own != named => {
                Err(Problem::new(StatusCode::FORBIDDEN, "this token speaks for another user"))
            }
            (Some(own), _) => Ok(Speaker::OwnToken { user_id: own.to_owned() }),
            (None, Some(named)) => Ok(Speaker::User { user_id: named.to_owned(), shared }),
            (None, None) => Ok(Speaker::Application),
        }
    }

    /// Checks that the caller may write in a conversation (its stored id) whose latest session is of the agent `latest`. A
    /// token of one agent or user begins no conversation that a messenger, a schedule, a mail or a notice of others will
    /// use.
    ///
    /// # Errors
    /// 404 for a conversation of another agent, 403 for one that the caller may not begin.
    pub fn enters(&self, stored: &str, latest: Option<&str>) -> Result<(), Problem> {
        let id = stored.split_once('/').map_or(stored, |(_, id)| id);
        match (latest, &self.reach.agent) {
            (Some(latest), Some(own)) if own != latest => {
                Err(wakeful_store::Error::NotFound { what: "conversation", id: id.to_owned() }.into())
            }
            (None, _) if !self.begins(stored) => {
                let detail = format!(
                    "conversation {id:?} is one that a messenger, a schedule, a mail or a notice begins; this token may not"
                );
                Err(Problem::new(StatusCode::FORBIDDEN, detail))
            }
            _ => Ok(()),
        }
    }

    /// Whether the caller may begin a conversation of this stored id.
    pub fn begins(&self, stored: &str) -> bool {
        let is_limited = self.reach.agent.is_some() || self.reach.user_id.is_some();
        !is_limited || !is_reserved(stored.split_once('/').map_or(stored, |(_, id)| id))
    }

    /// Whether the caller's token is still in force. For answers that take long.
    pub async fn is_in_force(&self, ctx: &Ctx) -> wakeful_store::Result<bool> {
        if self.expires_at.is_some_and(|at| at <= Utc::now()) {
            return Ok(false);
        }
        match &self.who {
            Who::Token { token_id, .. } | Who::User { issuer: Some(token_id), .. } => {
                ctx.store.token_in_force(token_id).await
            }
            Who::ThisMachine | Who::Configuration | Who::User { issuer: None, .. } => Ok(true),
        }
    }

    /// Checks the caller against the rule of a route.
    ///
    /// # Errors
    /// 403 that names the scope, or what the token is limited to.
    pub fn may(&self, rule: &Rule) -> Result<(), Problem> {
        let refused = |detail: String| Err(Problem::new(StatusCode::FORBIDDEN, detail));
        let limit = match self {
            Caller { reach: Reach { user_id: Some(_), .. }, .. } => Some((OpenTo::Users, "a user's token")),
            Caller { reach: Reach { agent: Some(_), .. }, .. } => {
                Some((OpenTo::Agents, "a token of one agent"))
            }
            Caller { everywhere: false, .. } => Some((OpenTo::Spaces, "a token of one space")),
            _ => None,
        };
        if let Some((least, what)) = limit
            && rule.open_to < least
        {
            return refused(format!("{what} may not ask for {} {}", rule.method, rule.path));
        }
        if self.scope < rule.needs {
            let (has, needs) = (self.scope.as_str(), rule.needs.as_str());
            let problem = Problem::new(
                StatusCode::FORBIDDEN,
                format!("this token has the scope `{has}`; this needs `{needs}`"),
            );
            return Err(problem.with("scope", has).with("needed_scope", needs));
        }
        Ok(())
    }
}

/// The space that a request names in its header.
///
/// # Errors
/// 400 for what cannot be a space.
pub(crate) fn named_space(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(name) = headers.get(SPACE) else { return Ok(None) };
    match name.to_str() {
        Ok(name) if is_space(name) => Ok(Some(name)),
        _ => Err(no_space(SPACE, &String::from_utf8_lossy(name.as_bytes()))),
    }
}

/// The error for a name that no space can have.
fn no_space(field: &str, name: &str) -> Problem {
    let shown: String = name.chars().take(80).collect();
    Problem::bad_request(format!(
        "`{field}`: {shown:?} names no space: it has 1 to 64 letters, digits, -, _ and ."
    ))
}

/// Whether this is a header that proxies add. A proxy on this machine passes on what others ask.
fn is_of_a_proxy(name: &HeaderName) -> bool {
    const OTHERS: [&str; 5] = ["via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"];
    *name == FORWARDED || OTHERS.contains(&name.as_str()) || name.as_str().starts_with("x-forwarded-")
}

/// The fingerprint of the configured token. The users' tokens that it asks for carry it, so they end when
/// that token is replaced.
pub(crate) async fn configured_fingerprint(ctx: &Ctx) -> wakeful_store::Result<Option<String>> {
    match &ctx.config.server.token {
        Some(token) => ctx.store.fingerprint(token.expose_secret()).await.map(Some),
        None => Ok(None),
    }
}

/// The bearer token that the request gives, or an empty text.
fn given_token(headers: &HeaderMap) -> &str {
    headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer"))
        .map_or("", |(_, token)| token.trim())
}

fn is_configured(ctx: &Ctx, given: &str) -> bool {
    let configured = ctx.config.server.token.as_ref();
    configured.is_some_and(|token| bool::from(given.as_bytes().ct_eq(token.expose_secret().as_bytes())))
}

/// Returns whether the request has the configured token. Without one configured, only this machine can ask.
pub(crate) fn has_configured_token(ctx: &Ctx, headers: &HeaderMap) -> bool {
    ctx.config.server.token.is_none() || is_configured(ctx, given_token(headers))
}
