-- uses: pool
-- A worker says what a resident's process on it does. It counts for the wish that it acts under:
-- one of another generation or epoch, or from a place that the worker does not have, changes
-- nothing.
-- The resident does what the rank does that is furthest from done, of those that are there.
local name = worker_process(a.worker)
if not holds(name, a.token) then return fenced(name) end
local key, field = GANG .. a.gang, 'report:' .. a.resident .. ':' .. a.rank
local row = redis.call('HMGET', key, 'workers', 'resident:' .. a.resident, field)
if not row[2] or cjson.decode(row[1])[a.rank + 1] ~= a.worker then
  return cjson.encode({accepted = false})
end
local wish = cjson.decode(row[2])
if wish.generation ~= a.generation or wish.epoch ~= a.epoch then
  return cjson.encode({accepted = false})
end
if row[3] == a.report then return cjson.encode({accepted = true}) end

local SEVERITY = {gone = 0, ready = 1, moving = 2, starting = 3, draining = 4, failed = 5}

local function told()
  local far, doing, tier, detail = -1, 'starting', wish.tier, ''
  for _, rank in ipairs(wish.ranks) do
    local text = redis.call('HGET', key, 'report:' .. a.resident .. ':' .. rank)
    local one = text and cjson.decode(text)
    if not one or one.generation ~= wish.generation or one.epoch ~= wish.epoch then
      one = {doing = 'starting', tier = one and one.tier or 'absent', detail = ''}
    end
    if SEVERITY[one.doing] > far then
      far, doing, tier, detail = SEVERITY[one.doing], one.doing, one.tier, one.detail
    end
  end
  return doing, tier, detail
end

local doing, tier, detail = told()
redis.call('HSET', key, field, a.report)
show_gang(a.gang)
local now_doing, now_tier, now_detail = told()
if not row[3] or doing ~= now_doing or tier ~= now_tier or detail ~= now_detail then
  event('actual', {gang = a.gang, resident = a.resident, job = wish.job, role = wish.role,
    status = now_doing, tier = now_tier, generation = a.generation, epoch = a.epoch,
    detail = now_detail})
end
return cjson.encode({accepted = true})
