-- Records an evaluation, one per tag: a repetition after a crash changes nothing. The current
-- version becomes the best one if its `value` is the highest so far; retention keeps its weights.
-- Evaluations of any lineage but the current one are ignored.
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
if tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= args.lineage then
  return cjson.encode({recorded = false})
end
local row = cjson.encode({tag = args.tag, step = args.step, at_ms = NOW, by = args.name,
  result = args.result})
local is_new = redis.call('HSETNX', KEYS[1] .. ':evaluations', args.tag, row) == 1
if not is_new then return cjson.encode({recorded = false}) end
record_progress(KEYS[1])
local key = KEYS[1] .. ':job'
local job = redis.call('HMGET', key, 'version', 'manifest', 'best_value')
local is_current = tonumber(job[1]) == args.step
local best_before = tonumber(job[3] or '')
local is_best = args.value ~= nil and is_current
  and (best_before == nil or args.value > best_before)
if is_best then
  redis.call('HSET', key, 'best_version', args.step, 'best_manifest', job[2],
    'best_value', args.value)
end
append_event('evaluation', {job = args.job, tag = args.tag, lineage = args.lineage,
  step = args.step, best = is_best,
  manifest = is_current and job[2] or '', value = args.value}, args.result)
return cjson.encode({recorded = true})
