-- How many connections a worker opens at most. A worker of an earlier version does not say it.
alter table workers add column connections integer;
