-- uses: pool
-- A worker says what a resident's process on it does. It counts for the desired that it acts under:
-- one of another generation or epoch, or from a place that the worker does not have, changes
-- nothing.
-- The resident does what the rank does that is furthest from done, of those that are there.
local name = worker_name(args.worker)
if not has_lease(name, args.token) then return reject_fenced(name) end
local key, field = GANG .. args.gang, 'report:' .. args.instance .. ':' .. args.rank
local row = redis.call('HMGET', key, 'workers', 'instance:' .. args.instance, field)
if not row[2] or cjson.decode(row[1])[args.rank + 1] ~= args.worker then
  return cjson.encode({accepted = false})
end
local desired = cjson.decode(row[2])
if desired.generation ~= args.generation or desired.epoch ~= args.epoch then
  return cjson.encode({accepted = false})
end
if row[3] == args.report then return cjson.encode({accepted = true}) end

local SEVERITY = {gone = 0, ready = 1, moving = 2, starting = 3, draining = 4, failed = 5}

local function summarize_instance()
  local far, phase, tier, detail = -1, 'starting', desired.tier, ''
  for _, rank in ipairs(desired.ranks) do
    local text = redis.call('HGET', key, 'report:' .. args.instance .. ':' .. rank)
    local one = text and cjson.decode(text)
    if not one or one.generation ~= desired.generation or one.epoch ~= desired.epoch then
      one = {phase = 'starting', tier = one and one.tier or 'absent', detail = ''}
    end
    if SEVERITY[one.phase] > far then
      far, phase, tier, detail = SEVERITY[one.phase], one.phase, one.tier, one.detail
    end
  end
  return phase, tier, detail
end

local phase, tier, detail = summarize_instance()
redis.call('HSET', key, field, args.report)
update_gang_snapshot(args.gang)
local now_phase, now_tier, now_detail = summarize_instance()
if not row[3] or phase ~= now_phase or tier ~= now_tier or detail ~= now_detail then
  append_event('actual', {gang = args.gang, resident = args.instance, job = desired.job,
    role = desired.role,
    status = now_phase, tier = now_tier, generation = args.generation, epoch = args.epoch,
    detail = now_detail})
end
return cjson.encode({accepted = true})
