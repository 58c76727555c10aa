-- A worker reports what its gang does, for the epoch it acts under; a report for an older epoch
-- changes nothing.
local key = MESH .. ':gang:' .. a.gang
local row = hash(key)
local worker
for field, token in pairs(row) do
  if string.sub(field, 1, 7) == 'worker:' and tonumber(token) == a.token then
    worker = string.sub(field, 8)
  end
end
if not worker or not holds(worker, a.token) then
  return fenced(worker or 'a worker of gang ' .. a.gang)
end
if tonumber(row.epoch) ~= a.epoch then return cjson.encode({accepted = false}) end
local changed = row.actual_role ~= a.role or row.actual_state ~= a.status
  or tonumber(row.actual_epoch) ~= a.epoch or row.detail ~= a.detail
if changed then
  redis.call('HSET', key, 'actual_role', a.role, 'actual_state', a.status, 'actual_epoch', a.epoch,
    'detail', a.detail, 'changed_ms', NOW)
  event('actual', {gang = a.gang, role = a.role, status = a.status, epoch = a.epoch,
    detail = a.detail, job = row.desired_job})
end
return cjson.encode({accepted = true})
