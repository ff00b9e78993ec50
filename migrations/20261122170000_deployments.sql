-- Two deployments with different configurations may share a database: what one of them no longer has is not paused because the
-- other one never had it.
alter table schedules add column deployment text;

update schedules set deployment = 'default' where source = 'config';
