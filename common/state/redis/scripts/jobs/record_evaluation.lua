-- One result per tag: who evaluates again after a crash changes nothing. The current version is
-- the best one so far if the figure that the job is judged by says so; retention keeps its
-- weights. What was measured in a lineage that another has taken the place of is of no version
-- that there is.
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
if tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= args.lineage then
  return cjson.encode({recorded = false})
end
local row = cjson.encode({tag = args.tag, step = args.step, at_ms = NOW, by = args.name,
  result = args.result})
local first = redis.call('HSETNX', KEYS[1] .. ':evaluations', args.tag, row) == 1
if not first then return cjson.encode({recorded = false}) end
record_progress(KEYS[1])
local key = KEYS[1] .. ':job'
local job = redis.call('HMGET', key, 'version', 'manifest', 'best_value')
local current = tonumber(job[1]) == args.step
local before = tonumber(job[3] or '')
local best = args.value ~= nil and current and (before == nil or args.value > before)
if best then
  redis.call('HSET', key, 'best_version', args.step, 'best_manifest', job[2],
    'best_value', args.value)
end
append_event('evaluation', {job = args.job, tag = args.tag, lineage = args.lineage,
  step = args.step, best = best,
  manifest = current and job[2] or '', value = args.value}, args.result)
return cjson.encode({recorded = true})
