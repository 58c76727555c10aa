-- Answers whether an evaluation is recorded under a tag, and the job's phase. It is cheap, because
-- waiting callers poll it often.
local phase = redis.call('HGET', KEYS[1] .. ':job', 'phase')
if not phase then return reject('not_found', 'there is no job ' .. args.job) end
local recorded = redis.call('HEXISTS', KEYS[1] .. ':evaluations', args.tag) == 1
return cjson.encode({recorded = recorded, phase = phase})
