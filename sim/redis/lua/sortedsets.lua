-- Commands on sorted sets: `scores` by member, and `members` in order of (score, member).
local parts = ...

local command, fail, fail_unsupported = parts.command, parts.fail, parts.fail_unsupported
local format_number, parse_float = parts.format_number, parts.parse_float
local resolve_range, value = parts.resolve_range, parts.value
local floor, insert, remove = math.floor, table.insert, table.remove
local sub, upper = string.sub, string.upper

local OPTIONS = {NX = true, XX = true, GT = true, LT = true, CH = true, INCR = true}

-- Returns the first index whose entry is not before (score, member).
local function find_index(set, score, member)
  local members, scores = set.members, set.scores
  local low, high = 1, #members + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local other = members[middle]
    local other_score = scores[other]
    if other_score < score or other_score == score and other < member then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function set_score(set, score, member)
  local members, before = set.members, set.scores[member]
  if before == score then return 0 end
  if before then remove(members, find_index(set, before, member)) end
  local last = members[#members]
  if not last or set.scores[last] < score then -- fast path: ids and times mostly increase
    members[#members + 1] = member
  else
    insert(members, find_index(set, score, member), member)
  end
  set.scores[member] = score
  return before and 0 or 1
end

command('ZADD', -4, 'wm', function(space, args, n)
  if OPTIONS[upper(args[3])] then fail_unsupported('ZADD with ' .. args[3]) end
  if n % 2 == 1 then fail('ERR syntax error') end
  local entries = {}
  for i = 3, n, 2 do
    entries[#entries + 1] = {parse_float(args[i], 'ERR value is not a valid float'), args[i + 1]}
  end
  local set = value(space, args[2], 'zset')
  if not set then
    set = {kind = 'zset', scores = {}, members = {}}
    space.keys[args[2]] = set
  end
  local new = 0
  for _, pair in ipairs(entries) do new = new + set_score(set, pair[1], pair[2]) end
  return new
end)

command('ZREM', -3, 'w', function(space, args, n)
  local set = value(space, args[2], 'zset')
  if not set then return 0 end
  local removed = 0
  for i = 3, n do
    local score = set.scores[args[i]]
    if score then
      remove(set.members, find_index(set, score, args[i]))
      set.scores[args[i]] = nil
      removed = removed + 1
    end
  end
  if #set.members == 0 then space.keys[args[2]] = nil end
  return removed
end)

command('ZCARD', 2, '', function(space, args)
  local set = value(space, args[2], 'zset')
  return set and #set.members or 0
end)

local function count_members(set) return #set.members end

command('ZSCORE', 3, '', function(space, args)
  local set = value(space, args[2], 'zset')
  return set and set.scores[args[3]] and format_number(set.scores[args[3]]) or false
end)

-- Returns members by their indices, with scores if the command has WITHSCORES.
local function list_members(set, first, last, args, n)
  if n > 5 or n == 5 and upper(args[5]) ~= 'WITHSCORES' then
    fail_unsupported(args[1] .. ' with ' .. args[5])
  end
  local found = {}
  for i = first, last do
    found[#found + 1] = set.members[i]
    if n == 5 then found[#found + 1] = format_number(set.scores[set.members[i]]) end
  end
  return found
end

command('ZRANGE', -4, '', function(space, args, n)
  local set, start, stop = resolve_range(space, args, 'zset', count_members)
  return list_members(set, start + 1, stop + 1, args, n)
end)

local function bound(text)
  local open = sub(text, 1, 1) == '('
  return parse_float(open and sub(text, 2) or text, 'ERR min or max is not a float'), open
end

-- Returns the sorted set, and the first and last index within the bounds args[3] and args[4].
local function find_range(space, args)
  local low, above = bound(args[3])
  local high, below = bound(args[4])
  local set = value(space, args[2], 'zset')
  if not set then return nil, 1, 0 end
  local members, scores = set.members, set.scores
  local first = find_index(set, low, '')
  while above and members[first] and scores[members[first]] == low do first = first + 1 end
  local last = find_index(set, high, '') - 1
  while not below and members[last + 1] and scores[members[last + 1]] == high do last = last + 1 end
  return set, first, last
end

command('ZRANGEBYSCORE', -4, '', function(space, args, n)
  local set, first, last = find_range(space, args)
  return list_members(set, first, last, args, n)
end)

command('ZREMRANGEBYSCORE', 4, 'w', function(space, args)
  local set, first, last = find_range(space, args)
  for _ = first, last do set.scores[remove(set.members, first)] = nil end
  if set and #set.members == 0 then space.keys[args[2]] = nil end
  return math.max(last - first + 1, 0)
end)
