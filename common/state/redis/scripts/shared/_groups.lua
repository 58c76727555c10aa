-- Rows of groups. A group in work is in exactly one of the indexes open, ready and leased. Indexes
-- are ordered by group id, which is the order of opening. Ended groups are only in events and step
-- rows.
local JOB = KEYS[1]

local function group_key(group) return JOB .. ':group:' .. group end
local function index_key(state) return JOB .. ':' .. state end
local function add_count(field, n) redis.call('HINCRBY', JOB .. ':job', field, n) end

local function move_group(group, from, to)
  redis.call('ZREM', index_key(from), group)
  redis.call('ZADD', index_key(to), group, group)
  redis.call('HSET', group_key(group), 'state', to)
end

-- Removes a group that will not train and returns its admission to the gate. With `requeue` its
-- prompt goes back to the cursor. The prompt retains the count of steps that passed it over, so
-- that slow prompts are not passed over for ever.
local function return_group(group, row, requeue)
  redis.call('ZREM', index_key(row.state), group)
  redis.call('DEL', group_key(group))
  add_count('admitted', -1)
  if requeue then redis.call('RPUSH', JOB .. ':requeue', row.prompt .. ':' .. row.passed) end
end
