-- How far every job has come, and which of the jobs that the caller knows were deleted, and when.
local found, deleted = {}, {}
for _, job in ipairs(redis.call('ZRANGE', MESH .. ':jobs', 0, -1)) do
  local row = redis.call('HMGET', '{' .. job .. '}:job', 'lineage', 'version', 'next_group',
    'phase')
  if row[1] then
    found[#found + 1] = {job = job, lineage = tonumber(row[1]), version = tonumber(row[2]),
      next_group = tonumber(row[3]), phase = row[4],
      run_dir = redis.call('HGET', '{' .. job .. '}:submission', 'run_dir')}
  end
end
for _, job in ipairs(args.known) do
  local at = redis.call('ZSCORE', MESH .. ':jobs:deleted', job)
  if at then deleted[#deleted + 1] = {job = job, at_ms = tonumber(at)} end
end
return cjson.encode({jobs = found, deleted = deleted})
