-- One result per tag: who evaluates again after a crash changes nothing. The current version is
-- the best one so far if the figure that the job is judged by says so; retention keeps its
-- weights. What was measured in a lineage that another has taken the place of is of no version
-- that there is.
if not holds(a.name, a.token) then return fenced(a.name) end
if tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= a.lineage then
  return cjson.encode({recorded = false})
end
local row = cjson.encode({tag = a.tag, step = a.step, at_ms = NOW, by = a.name, result = a.result})
local first = redis.call('HSETNX', KEYS[1] .. ':evaluations', a.tag, row) == 1
if not first then return cjson.encode({recorded = false}) end
progressed(KEYS[1])
local key = KEYS[1] .. ':job'
local job = redis.call('HMGET', key, 'version', 'manifest', 'best_value')
local current = tonumber(job[1]) == a.step
local before = tonumber(job[3] or '')
local best = a.value ~= nil and current and (before == nil or a.value > before)
if best then
  redis.call('HSET', key, 'best_version', a.step, 'best_manifest', job[2], 'best_value', a.value)
end
event('evaluation', {job = a.job, tag = a.tag, lineage = a.lineage, step = a.step, best = best,
  manifest = current and job[2] or '', value = a.value}, a.result)
return cjson.encode({recorded = true})
