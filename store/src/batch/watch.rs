//! Looks how the members of a batch fare: moves on to the next stage, ends the batch, or pauses it when the failure comes back.

use super::act::Claimed;
use crate::{Result, Store};

/// What a batch does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Act on members of the stages up to this one.
    Act { stage: i32 },
    /// Runs of this stage have not ended.
    Wait,
    /// It has ended, or it is paused.
    Over,
}

/// How the members of a stage fare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stage {
    size: i64,
    pending: i64,
    acted: i64,
    /// Acted members whose runs have not ended.
    open: i64,
    failed_again: i64,
}

/// The fewest members of the last stage that say something about the rest.
const ENOUGH: i64 = 10;

impl Stage {
    /// Returns whether too many members failed again. A stage of a canary is judged by its size, so that its first failures stop it
    /// only if they are already too many for the whole stage. The last stage is judged by the members that were acted on so far.
    fn fails(self, stop_share: f64, is_last: bool) -> bool {
        let of = if is_last { self.acted.max(ENOUGH) } else { self.size };
        self.failed_again > 0 && self.failed_again as f64 > stop_share * of as f64
    }
}

/// Notes how runs ended, and says what comes next.
pub(super) async fn look(store: &Store, batch: &Claimed) -> Result<Next> {
    let is_retry = batch.verb == "retry";
    if is_retry {
        note_results(store, &batch.batch_id).await?;
    }
    let last = batch.stages.len() as i32;
    let mut stage = batch.stage;
    loop {
        let now = read(store, batch, stage, is_retry).await?;
        if let Some(stop_share) = batch.stop_share
            && now.fails(stop_share, stage == last)
        {
            pause(store, batch, stage, now).await?;
            return Ok(Next::Over);
        }
        match (now.pending, now.open) {
            (1.., _) => {
                move_to(store, batch, stage).await?;
                return Ok(Next::Act { stage });
            }
            (_, 1..) => {
                move_to(store, batch, stage).await?;
                return Ok(Next::Wait);
            }
            (_, _) if stage < last => stage += 1,
            (_, _) => {
                end(store, &batch.batch_id).await?;
                return Ok(Next::Over);
            }
        }
    }
}

async fn note_results(store: &Store, batch_id: &str) -> Result<()> {
    sqlx::query!(
        "update batch_members m
        set result = case
                when judged.passed then 'passed'
                when r.status = 'cancelled' or r.error = 'cancelled' then 'cancelled'
                else 'failed_again'
            end,
            detail = case when judged.passed then null when r.error like 'wks1%' then '[sealed]' else r.error end,
            result_at = clock_timestamp()
        from session_runs r
        cross join lateral (
            -- A run that waits for approval has got past its failure, as one that asks has.
            select r.status in ('completed', 'waiting_input') or r.status = 'needs_attention' and exists (
                select from tool_calls c
                where c.session_id = r.session_id and c.status = 'unapproved' and c.result_message_number is null
            ) and not exists (
                select from tool_calls c
                where c.session_id = r.session_id and c.status = 'uncertain' and c.result_message_number is null
            ) as passed
        ) judged
        where m.batch_id = $1 and m.outcome = 'acted' and m.result is null
            and r.run_id = m.run_id and r.status not in ('queued', 'running')",
        batch_id
    )
    .execute(&store.pool)
    .await?;
    // Else the batch would never stop waiting for it.
    sqlx::query!(
        "update batch_members m
        set result = 'cancelled', detail = 'its run was erased', result_at = clock_timestamp()
        where m.batch_id = $1 and m.outcome = 'acted' and m.result is null and m.run_id is not null
            and not exists (select from session_runs r where r.run_id = m.run_id)",
        batch_id
    )
    .execute(&store.pool)
    .await?;
    Ok(())
}

/// Counts a stage. What failed before a person said to go on is forgiven.
async fn read(store: &Store, batch: &Claimed, stage: i32, is_retry: bool) -> Result<Stage> {
    Ok(sqlx::query_as!(
        Stage,
        r#"select count(*) as "size!",
            count(*) filter (where outcome = 'pending') as "pending!",
            count(*) filter (where outcome = 'acted') as "acted!",
            count(*) filter (where outcome = 'acted' and result is null and $3) as "open!",
            count(*) filter (where result = 'failed_again' and ($4::timestamptz is null or result_at > $4)) as "failed_again!"
        from batch_members where batch_id = $1 and stage = $2"#,
        batch.batch_id,
        stage,
        is_retry,
        batch.resumed_at
    )
    .fetch_one(&store.pool)
    .await?)
}

async fn move_to(store: &Store, batch: &Claimed, stage: i32) -> Result<()> {
    if stage != batch.stage {
        sqlx::query!(
            "update batches set stage = $2 where batch_id = $1 and stage < $2",
            batch.batch_id,
            stage
        )
        .execute(&store.pool)
        .await?;
    }
    Ok(())
}

/// Pauses the batch, and says what came back.
async fn pause(store: &Store, batch: &Claimed, stage: i32, now: Stage) -> Result<()> {
    let error = sqlx::query_scalar!(
        "select detail from batch_members
        where batch_id = $1 and stage = $2 and result = 'failed_again'
        group by detail order by count(*) desc, detail limit 1",
        batch.batch_id,
        stage
    )
    .fetch_optional(&store.pool)
    .await?
    .flatten();
    let of = if batch.stages.is_empty() {
        String::new()
    } else {
        format!(" in stage {} of {}", stage + 1, batch.stages.len() + 1)
    };
    let error = error.map(|error| format!(", most often with: {error}")).unwrap_or_default();
    let reason = format!("{} of {} retried sessions failed again{of}{error}", now.failed_again, now.acted);
    sqlx::query!(
        "with stopped as (
            update batches set status = 'paused', status_reason = $2, stage = $3
            where batch_id = $1 and status = 'running'
            returning space_id, batch_id
        )
        insert into transitions (space_id, kind, subject) select space_id, 'batch_stopped', batch_id from stopped",
        batch.batch_id,
        reason,
        stage
    )
    .execute(&store.pool)
    .await?;
    Ok(())
}

async fn end(store: &Store, batch_id: &str) -> Result<()> {
    // No member is pending or open, so nothing changes the counts any more.
    sqlx::query!(
        "update batches set status = 'done', status_reason = null, ended_at = clock_timestamp(), stage = cardinality(stages),
            ended_counts = count_batch(batch_id)
        where batch_id = $1 and status = 'running'",
        batch_id
    )
    .execute(&store.pool)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_fails_when_more_members_fail_again_than_may() {
        let stage = |size, acted, failed_again| Stage { size, acted, failed_again, ..Stage::default() };
        assert!(stage(1, 1, 1).fails(0.2, false));
        assert!(!stage(10, 10, 2).fails(0.2, false));
        assert!(stage(10, 4, 3).fails(0.2, false));
        assert!(!stage(989, 5, 2).fails(0.2, true), "ten say something, five do not");
        assert!(stage(989, 50, 11).fails(0.2, true));
        assert!(!stage(1, 1, 0).fails(0.0, false) && stage(1, 1, 1).fails(0.0, false));
    }
}
