-- Records an evaluation, one per tag: a repetition after a crash changes nothing. The current
-- version becomes the best one if its `value` is the highest so far; retention keeps its weights.
-- Evaluations of any lineage but the current one are ignored. After `patience` evaluations without
-- a better version, the step in progress becomes the last one: `early_stop` is the evaluated
-- version, and `full_budget` the former `budget_steps`. The job's trainer reads `budget_steps`
-- between an evaluation and the next commit.
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
if tonumber(redis.call('HGET', KEYS[1] .. ':job', 'lineage')) ~= args.lineage then
  return cjson.encode({recorded = false})
end
local key = KEYS[1] .. ':job'
local job = read_hash(key)
local is_current = tonumber(job.version) == args.step
local row = cjson.encode({tag = args.tag, step = args.step, at_ms = NOW, by = args.name,
  result = args.result, value = is_current and args.value or nil})
local is_new = redis.call('HSETNX', KEYS[1] .. ':evaluations', args.tag, row) == 1
if not is_new then return cjson.encode({recorded = false}) end
record_progress(KEYS[1])
local best_before = tonumber(job.best_value or '')
local is_best = args.value ~= nil and is_current
  and (best_before == nil or args.value > best_before)
if is_best then
  redis.call('HSET', key, 'best_version', args.step, 'best_manifest', job.manifest,
    'best_value', args.value)
end

-- Counts the evaluations that could have made a version after this one the best one.
local function count_since(version)
  local n = 0
  for _, text in pairs(read_hash(KEYS[1] .. ':evaluations')) do
    local one = cjson.decode(text)
    if one.value and one.step > version then n = n + 1 end
  end
  return n
end

local ends_at = nil
if args.patience > 0 and args.value and is_current and not is_best and job.phase == 'training'
  and args.step + 1 < tonumber(job.budget_steps) then
  local since = math.max(tonumber(job.best_version), tonumber(job.patience_since or -1))
  if count_since(since) >= args.patience then
    ends_at = args.step + 1
    redis.call('HSET', key, 'early_stop', args.step, 'full_budget', job.budget_steps,
      'budget_steps', ends_at)
  end
end
append_event('evaluation', {job = args.job, tag = args.tag, lineage = args.lineage,
  step = args.step, best = is_best,
  manifest = is_current and job.manifest or '', value = args.value, ends_at = ends_at,
  best_version = ends_at and tonumber(job.best_version),
  patience = ends_at and args.patience}, args.result)
return cjson.encode({recorded = true})
