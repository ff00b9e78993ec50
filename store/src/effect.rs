//! Uncertain effects across sessions: the list of them, and which of them a batch resolves.
//!
//! An effect is a tool call or a delivery. It is named by its session and its id in there. The list has those that no person has
//! resolved; with [`EffectFilter::all`] also those that were left to the model, and those of replays and imports.

use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use wakeful_workflow::session::SessionStatus;

/// What an effect is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum EffectKind {
    /// A tool call.
    Call,
    /// An outgoing message.
    Delivery,
}

impl EffectKind {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            EffectKind::Call => "call",
            EffectKind::Delivery => "delivery",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<EffectKind> {
        [EffectKind::Call, EffectKind::Delivery].into_iter().find(|kind| kind.as_str() == word)
    }
}

/// The name of an effect.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct EffectName {
    pub session_id: String,
    /// The id of a call or of a delivery.
    pub effect_id: String,
}

/// Which uncertain effects are looked for.
#[derive(Clone, Debug, Default)]
pub struct EffectFilter {
    pub space_id: Option<String>,
    pub agent: Option<String>,
    pub session_id: Option<String>,
    /// Only calls of this tool.
    pub tool: Option<String>,
    /// Only messages of this channel.
    pub channel: Option<String>,
    pub kind: Option<EffectKind>,
    /// That began then or later.
    pub since: Option<DateTime<Utc>>,
    /// That began before then.
    pub until: Option<DateTime<Utc>>,
    /// Also those that were left to the model, and those of replays and imports.
    pub all: bool,
    /// The last effect of the page before.
    pub before: Option<EffectName>,
    pub limit: i64,
}

/// An uncertain effect for display.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UncertainEffect {
    pub session_id: String,
    pub effect_id: String,
    pub kind: EffectKind,
    /// As in the API: without the space.
    pub conversation_id: String,
    pub agent: String,
    pub session_status: String,
    /// The tool, or the channel.
    pub name: String,
    /// Of a call.
    pub arguments: Option<Value>,
    /// Of a message: what the last attempt met.
    pub last_error: Option<String>,
    pub began_at: Option<DateTime<Utc>>,
    /// Its process may still carry it out until then, so until then it cannot be said that it did not happen.
    pub may_happen_until: Option<DateTime<Utc>>,
    /// The model was told that the outcome is unknown.
    pub told: bool,
    /// The run goes on at this moment: it can be resolved when the run has paused or ended.
    pub in_hand: bool,
    /// A person left it to the model.
    pub left_to_model: bool,
}

/// An effect that was found, with what decides whether it can be resolved now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundEffect {
    pub session_id: String,
    pub effect_id: String,
    pub is_call: bool,
    pub space_id: String,
    /// The tool, or the channel.
    pub name: String,
    pub status: String,
    /// See [`UncertainEffect::in_hand`].
    pub in_hand: bool,
    /// See [`UncertainEffect::may_happen_until`].
    pub may_happen: bool,
}

/// The statuses of sessions whose run a worker may have in its hands.
fn open_statuses() -> Vec<String> {
    let open = SessionStatus::ALL.into_iter().filter(|status| status.is_open());
    open.map(|status| status.as_str().to_owned()).collect()
}

impl Store {
    /// Uncertain effects, those of the newest sessions first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn uncertain_effects(&self, filter: &EffectFilter) -> Result<Vec<UncertainEffect>> {
        let found = self.find_effects(filter).await?;
        self.effects_by_name(&found).await
    }

    /// The effects that the filter finds, in the order of the list.
    pub(crate) async fn find_effects(&self, filter: &EffectFilter) -> Result<Vec<FoundEffect>> {
        let calls = filter.channel.is_none() && filter.kind != Some(EffectKind::Delivery);
        let deliveries = filter.tool.is_none() && filter.kind != Some(EffectKind::Call);
        let open = open_statuses();
        let mut tx = self.pool.planned().await?;
        let found = sqlx::query_as!(
            FoundEffect,
            r#"
            select session_id as "session_id!", effect_id as "effect_id!", is_call as "is_call!", space_id as "space_id!",
                name as "name!", 'uncertain' as "status!", in_hand as "in_hand!",
                may_happen as "may_happen!"
            from (
                (
                    select c.session_id, c.call_id as effect_id, true as is_call, c.space_id, c.name,
                        c.result_message_number is null and s.status = any ($12) as in_hand,
                        coalesce(c.settled_by > clock_timestamp(), false) as may_happen
                    from tool_calls c
                    join conversation_sessions s on s.session_id = c.session_id
                    where $13 and c.status = 'uncertain'
                        and ($1::text is null or c.space_id = $1)
                        and ($2::text is null or s.agent = $2)
                        and ($3::text is null or c.session_id = $3)
                        and ($4::text is null or c.name = $4)
                        and ($6::timestamptz is null or c.started_at >= $6)
                        and ($7::timestamptz is null or c.started_at < $7)
                        and ($8 or coalesce(c.resolution ->> 'outcome', 'approved') = 'approved' and s.trigger_type not in ('replay', 'import'))
                        and ($9::text is null or (c.session_id, c.call_id) < ($9, $10))
                    order by c.session_id desc, c.call_id desc
                    limit $11
                )
                union all
                (
                    select d.session_id, d.delivery_id, false, d.space_id, d.channel, false,
                        coalesce(d.settled_by > clock_timestamp(), false)
                    from deliveries d
                    join conversation_sessions s on s.session_id = d.session_id
                    where $14 and d.status = 'uncertain'
                        and ($1::text is null or d.space_id = $1)
                        and ($2::text is null or s.agent = $2)
                        and ($3::text is null or d.session_id = $3)
                        and ($5::text is null or d.channel = $5)
                        and ($6::timestamptz is null or coalesce(d.tried_since, d.created_at) >= $6)
                        and ($7::timestamptz is null or coalesce(d.tried_since, d.created_at) < $7)
                        and ($8 or not d.imported and s.trigger_type not in ('replay', 'import'))
                        and ($9::text is null or (d.session_id, d.delivery_id) < ($9, $10))
                    order by d.session_id desc, d.delivery_id desc
                    limit $11
                )
            ) found
            order by session_id desc, effect_id desc
            limit $11
            "#,
            filter.space_id,
            filter.agent,
            filter.session_id,
            filter.tool,
            filter.channel,
            filter.since,
            filter.until,
            filter.all,
            filter.before.as_ref().map(|name| name.session_id.as_str()),
            filter.before.as_ref().map(|name| name.effect_id.as_str()),
            filter.limit,
            &open,
            calls,
            deliveries
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        Ok(found)
    }

    /// The effects that are named, whatever became of them.
    ///
    /// # Errors
    /// [`Error::NotFound`] for one that the filter's space and agent do not have.
    pub(crate) async fn named_effects(
        &self,
        names: &[EffectName],
        within: &EffectFilter,
    ) -> Result<Vec<FoundEffect>> {
        let (sessions, ids): (Vec<String>, Vec<String>) =
            names.iter().map(|name| (name.session_id.clone(), name.effect_id.clone())).unzip();
        let found = sqlx::query_as!(
            FoundEffect,
            r#"
            select n.session_id as "session_id!", n.effect_id as "effect_id!", c.call_id is not null as "is_call!",
                s.space_id, coalesce(c.name, d.channel) as "name!", coalesce(c.status, d.status) as "status!",
                c.call_id is not null and c.result_message_number is null and s.status = any ($5) as "in_hand!",
                coalesce(coalesce(c.settled_by, d.settled_by) > clock_timestamp(), false) as "may_happen!"
            from unnest($1::text[], $2::text[]) as n (session_id, effect_id)
            join conversation_sessions s on s.session_id = n.session_id
            left join tool_calls c on c.session_id = n.session_id and c.call_id = n.effect_id
            left join deliveries d on c.call_id is null and d.session_id = n.session_id and d.delivery_id = n.effect_id
            where coalesce(c.call_id, d.delivery_id) is not null
                and ($3::text is null or s.space_id = $3)
                and ($4::text is null or s.agent = $4)
            "#,
            &sessions,
            &ids,
            within.space_id,
            within.agent,
            &open_statuses()
        )
        .fetch_all(&self.pool)
        .await?;
        let is_found = |name: &&EffectName| {
            found.iter().any(|one| one.session_id == name.session_id && one.effect_id == name.effect_id)
        };
        match names.iter().find(|name| !is_found(name)) {
            Some(missing) => Err(Error::NotFound { what: "effect", id: missing.effect_id.clone() }),
            None => Ok(found),
        }
    }

    /// These effects as they are shown, in this order.
    pub(crate) async fn effects_by_name(&self, found: &[FoundEffect]) -> Result<Vec<UncertainEffect>> {
        let (sessions, ids): (Vec<String>, Vec<String>) =
            found.iter().map(|one| (one.session_id.clone(), one.effect_id.clone())).unzip();
        let rows = sqlx::query!(
            r#"
            select n.session_id as "session_id!", n.effect_id as "effect_id!", c.call_id is not null as "is_call!",
                right(s.conversation_id, -length(s.space_id) - 1) as "conversation_id!", s.agent, s.status,
                coalesce(c.name, d.channel) as "name!",
                (
                    select block -> 'arguments'
                    from conversation_records r, jsonb_array_elements(r.content::jsonb) block
                    where r.conversation_id = s.conversation_id and r.message_number = c.message_number
                        and block ->> 'call_id' = c.call_id
                    limit 1
                ) as arguments,
                d.last_error as "last_error?",
                coalesce(c.started_at, d.tried_since, d.created_at) as began_at,
                case when coalesce(c.settled_by, d.settled_by) > clock_timestamp()
                    then coalesce(c.settled_by, d.settled_by) end as may_happen_until,
                c.result_message_number is not null as "told!",
                c.call_id is not null and c.result_message_number is null and s.status = any ($3) as "in_hand!",
                coalesce(c.resolution ->> 'outcome' <> 'approved', false) as "left_to_model!"
            from unnest($1::text[], $2::text[]) with ordinality as n (session_id, effect_id, place)
            join conversation_sessions s on s.session_id = n.session_id
            left join tool_calls c on c.session_id = n.session_id and c.call_id = n.effect_id
            left join deliveries d on c.call_id is null and d.session_id = n.session_id and d.delivery_id = n.effect_id
            where coalesce(c.call_id, d.delivery_id) is not null
            order by n.place
            "#,
            &sessions,
            &ids,
            &open_statuses()
        )
        .fetch_all(&self.pool)
        .await?;
        let mut effects = Vec::with_capacity(rows.len());
        for row in rows {
            let arguments = match row.arguments {
                Some(arguments) => Some(self.reveal_value(Some(&row.session_id), arguments).await),
                None => None,
            };
            let last_error = self.reveal_some(Some(&row.session_id), row.last_error).await;
            effects.push(UncertainEffect {
                session_id: row.session_id,
                effect_id: row.effect_id,
                kind: if row.is_call { EffectKind::Call } else { EffectKind::Delivery },
                conversation_id: row.conversation_id,
                agent: row.agent,
                session_status: row.status,
                name: row.name,
                arguments,
                last_error,
                began_at: row.began_at,
                may_happen_until: row.may_happen_until,
                told: row.told,
                in_hand: row.in_hand,
                left_to_model: row.left_to_model,
            });
        }
        Ok(effects)
    }
}
