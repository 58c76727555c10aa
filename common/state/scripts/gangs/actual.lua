-- uses: gang
-- A worker reports what it does, for the epoch it acts under; a report for an older epoch changes
-- nothing. A gang that was lost stays so until all its workers are there again.
local key = MESH .. ':gang:' .. a.gang
local row = hash(key)
local reporter
for worker, token in pairs(workers_of(row)) do
  if token == a.token then reporter = worker end
end
if not reporter or not holds(reporter, a.token) then
  return fenced(reporter or 'a worker of gang ' .. a.gang)
end
if tonumber(row.epoch) ~= a.epoch then return cjson.encode({accepted = false}) end
redis.call('HSET', key, 'state:' .. reporter, a.status, 'epoch:' .. reporter, a.epoch,
  'detail:' .. reporter, a.detail)
local status, detail = of_gang(row, reporter, a.status, a.detail)
if row.actual_state == 'lost' and not all_there(row) then
  status, detail = 'lost', row.detail
end
local changed = row.actual_role ~= a.role or row.actual_state ~= status
  or tonumber(row.actual_epoch) ~= a.epoch or row.detail ~= detail
if changed then
  redis.call('HSET', key, 'actual_role', a.role, 'actual_state', status, 'actual_epoch', a.epoch,
    'detail', detail, 'changed_ms', NOW)
  event('actual', {gang = a.gang, role = a.role, status = status, epoch = a.epoch,
    detail = detail, job = row.desired_job})
end
return cjson.encode({accepted = true})
