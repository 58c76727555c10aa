-- Answers the progress of every job, and which of the caller's `known` jobs were deleted, with
-- times.
local jobs, deleted = {}, {}
for _, job in ipairs(redis.call('ZRANGE', MESH .. ':jobs', 0, -1)) do
  local row = redis.call('HMGET', '{' .. job .. '}:job', 'lineage', 'version', 'next_group',
    'phase')
  if row[1] then
    jobs[#jobs + 1] = {job = job, lineage = tonumber(row[1]), version = tonumber(row[2]),
      next_group = tonumber(row[3]), phase = row[4],
      run_dir = redis.call('HGET', '{' .. job .. '}:submission', 'run_dir')}
  end
end
for _, job in ipairs(args.known) do
  local deleted_ms = redis.call('ZSCORE', MESH .. ':jobs:deleted', job)
  if deleted_ms then deleted[#deleted + 1] = {job = job, at_ms = tonumber(deleted_ms)} end
end
return cjson.encode({jobs = jobs, deleted = deleted})
