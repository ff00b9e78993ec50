//! Tries members of a batch dry, before anything is retried.
//!
//! The failed session is copied up to its last commit, and the copy runs as any session does: workers claim it, with the
//! configuration that they have now. It asks the model for real. Its tools are rehearsed and it sends nothing, so nothing happens to
//! the world, and nothing to the session. A kill between the copy and its note makes no second copy, because the batch is its key.

use super::act::Claimed;
use super::{Proof, ProofError};
use crate::fork::{ForkRequest, Purpose};
use crate::{Error, Result, Store};
use std::collections::BTreeMap;
use std::time::Duration;
use tracing::warn;
use wakeful_workflow::fork::CutPoint;
use wakeful_workflow::policy::ToolMode;

/// For how long a member is tried if its key cannot be had. The key store may be back soon.
const WITHOUT_KEY: Duration = Duration::from_secs(600);

/// How many errors the sentence names.
const NAMED: usize = 3;

struct Try {
    ordinal: i32,
    session_id: String,
    /// It was tried for as long as a member is.
    given_up: bool,
}

/// What became of a try to copy a session.
enum Copied {
    Runs(String),
    /// It cannot be tried, which is noted.
    Cannot,
    /// Not now.
    Later,
    /// The batch was cancelled meanwhile, and the copy with it.
    Cancelled,
}

/// Begins the next dry tries, and notes how others ended. Returns the copies, and whether the batch only waits for them.
pub(super) async fn turn(store: &Store, batch: &Claimed, many: i64) -> Result<(Vec<String>, bool)> {
    let mut copies = Vec::new();
    let mut moved = false;
    for one in &next(store, &batch.batch_id, many).await? {
        match copy(store, batch, one).await? {
            Copied::Runs(id) => copies.push(id),
            Copied::Cannot => {}
            Copied::Later => continue,
            Copied::Cancelled => return Ok((copies, true)),
        }
        moved = true;
    }
    note_results(store, &batch.batch_id).await?;
    let proof = read(store, &batch.batch_id).await?;
    let is_over = proof.pending == 0;
    let (proof_json, text) = (serde_json::to_value(&proof), proof.text);
    sqlx::query!(
        "update batches
        set proof = $2,
            status = case when $3 then 'paused' else status end,
            status_reason = case when $3 then $4 else status_reason end
        where batch_id = $1 and status = 'proving'",
        batch.batch_id,
        proof_json.map_err(|error| Error::corrupt("proof", error))?,
        is_over,
        text
    )
    .execute(&store.pool)
    .await?;
    Ok((copies, !moved))
}

async fn next(store: &Store, batch_id: &str, many: i64) -> Result<Vec<Try>> {
    let mut next = sqlx::query_as!(
        Try,
        // One that could not be copied now comes after those that were not tried yet.
        r#"update batch_proofs p
        set tried_at = clock_timestamp(), tried_since = coalesce(p.tried_since, clock_timestamp())
        from (
            select ordinal from batch_proofs
            where batch_id = $1 and result is null and copy_session_id is null
            order by tried_at nulls first, ordinal
            limit $2
        ) next
        where p.batch_id = $1 and p.ordinal = next.ordinal
        returning p.ordinal, p.session_id,
            p.tried_since < clock_timestamp() - make_interval(secs => $3) as "given_up!""#,
        batch_id,
        many,
        WITHOUT_KEY.as_secs_f64()
    )
    .fetch_all(&store.pool)
    .await?;
    next.sort_by_key(|one| one.ordinal);
    Ok(next)
}

/// Copies a session and lets the copy run.
async fn copy(store: &Store, batch: &Claimed, one: &Try) -> Result<Copied> {
    let request = ForkRequest {
        purpose: Purpose::Replay,
        model: batch.model(),
        tool_mode: Some(ToolMode::Dry),
        client_key: Some(batch.batch_id.clone()),
        ..ForkRequest::new(&one.session_id, CutPoint::End)
    };
    let (copy, error) = match store.fork(&request).await {
        Ok(forked) => (Some(forked.session_id), None),
        // One that cannot be read says nothing about the others.
        Err(error @ (Error::Refused { .. } | Error::NotFound { .. } | Error::Corrupt { .. })) => {
            (None, Some(format!("it cannot be tried: {error}")))
        }
        Err(error @ Error::Keys { .. }) if one.given_up || store.key_is_lost(&one.session_id).await? => {
            (None, Some(format!("it cannot be tried: {error}")))
        }
        Err(error @ Error::Keys { .. }) => {
            warn!(%error, session.id = one.session_id, "A member of a batch cannot be tried now; trying again");
            return Ok(Copied::Later);
        }
        Err(error) => return Err(error),
    };
    // The batch's row is locked, so a cancel either comes after this note and ends the copy, or is seen here.
    let is_cancelled = sqlx::query_scalar!(
        r#"with batch as (
            select status from batches where batch_id = $1 for share
        )
        update batch_proofs
        set copy_session_id = $3, error = $4, result = case when $4::text is not null then 'failed' end,
            same = case when $4::text is not null then false end
        from batch
        where batch_id = $1 and ordinal = $2 and result is null
        returning batch.status = 'cancelled' as "is_cancelled!""#,
        batch.batch_id,
        one.ordinal,
        copy.as_deref(),
        error
    )
    .fetch_optional(&store.pool)
    .await?;
    match copy {
        None => Ok(Copied::Cannot),
        Some(_) if is_cancelled == Some(true) => {
            store.cancel_copies(&batch.batch_id).await?;
            Ok(Copied::Cancelled)
        }
        Some(copy) => Ok(Copied::Runs(copy)),
    }
}

async fn note_results(store: &Store, batch_id: &str) -> Result<()> {
    sqlx::query!(
        "update batch_proofs p
        set result = case when r.status in ('completed', 'waiting_input') then 'passed' else 'failed' end,
            error = case when r.status not in ('completed', 'waiting_input') then coalesce(
                case when r.error like 'wks1%' then '[sealed]' else r.error end, r.status) end,
            fingerprint = now.fingerprint,
            same = case when r.status not in ('completed', 'waiting_input')
                then coalesce(now.fingerprint = before.fingerprint, false) end
        from session_runs r
        left join lateral (
            select fingerprint from run_failures f where f.session_id = r.session_id order by failure_id desc limit 1
        ) now on true, batch_proofs own
        left join lateral (
            select fingerprint from run_failures f where f.session_id = own.session_id order by failure_id desc limit 1
        ) before on true
        where p.batch_id = $1 and p.result is null and p.copy_session_id is not null
            and own.batch_id = p.batch_id and own.ordinal = p.ordinal
            and r.session_id = p.copy_session_id and r.status not in ('queued', 'running')",
        batch_id
    )
    .execute(&store.pool)
    .await?;
    // Else the batch would never stop waiting for it.
    sqlx::query!(
        "update batch_proofs p
        set result = 'failed', error = 'its copy was erased', same = false
        where p.batch_id = $1 and p.result is null and p.copy_session_id is not null
            and not exists (select from session_runs r where r.session_id = p.copy_session_id)",
        batch_id
    )
    .execute(&store.pool)
    .await?;
    Ok(())
}

async fn read(store: &Store, batch_id: &str) -> Result<Proof> {
    let rows = sqlx::query!(
        r#"select result, coalesce(fingerprint, error, '') as "group!", min(error) as error, coalesce(same, false) as "same!",
            count(*) as "count!"
        from batch_proofs where batch_id = $1
        group by 1, 2, 4"#,
        batch_id
    )
    .fetch_all(&store.pool)
    .await?;
    let mut proof = Proof::default();
    let mut errors: BTreeMap<(String, bool), ProofError> = BTreeMap::new();
    for row in rows {
        proof.asked += row.count;
        match row.result.as_deref() {
            None => proof.pending += row.count,
            Some("passed") => proof.passed += row.count,
            Some(_) => {
                proof.failed += row.count;
                let text = row.error.unwrap_or_default();
                let error = ProofError { text, count: 0, same: row.same };
                errors.entry((row.group, row.same)).or_insert(error).count += row.count;
            }
        }
    }
    proof.errors = errors.into_values().collect();
    proof.errors.sort_by_key(|error| -error.count);
    proof.text = said(&proof);
    Ok(proof)
}

/// `47 of 50 would pass, 2 fail as before, 1 fails otherwise: …`
fn said(proof: &Proof) -> String {
    let mut text = format!("{} of {} would pass", proof.passed, proof.asked);
    for (same, how) in [(true, "as before"), (false, "otherwise")] {
        let of: Vec<&ProofError> = proof.errors.iter().filter(|error| error.same == same).collect();
        let count: i64 = of.iter().map(|error| error.count).sum();
        if count == 0 {
            continue;
        }
        let named: Vec<String> = of
            .iter()
            .take(NAMED)
            .map(|error| {
                let text = error.text.split(". Remedy:").next().unwrap_or_default();
                if of.len() == 1 { text.to_owned() } else { format!("{} × {text}", error.count) }
            })
            .collect();
        let verb = if count == 1 { "fails" } else { "fail" };
        text.push_str(&format!(", {count} {verb} {how}: {}", named.join("; ")));
    }
    if proof.pending > 0 {
        text.push_str(&format!(", {} not known yet", proof.pending));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_one_sentence() {
        let error = |text: &str, count, same| ProofError { text: text.to_owned(), count, same };
        let proof = Proof {
            asked: 50,
            passed: 46,
            failed: 4,
            errors: vec![error("no model x. Remedy: correct it", 3, true), error("status 400", 1, false)],
            ..Proof::default()
        };
        assert_eq!(
            said(&proof),
            "46 of 50 would pass, 3 fail as before: no model x, 1 fails otherwise: status 400"
        );
        let proof = Proof { asked: 2, passed: 1, pending: 1, ..Proof::default() };
        assert_eq!(said(&proof), "1 of 2 would pass, 1 not known yet");
    }
}
